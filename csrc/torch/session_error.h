#pragma once

#include "kvswap/errors.h"
