#pragma once

#include <cmath>

namespace kvswap {

/// How a prompt's newest queries look at the tokens before them, in one layer (CAKE 4.1).
struct AttentionSpread {
  double dispersion = 0;  // sum of -a ln a over the attention of each query of each head
  double change = 0;      // sum over heads and tokens of the variance over queries

  void add(double received) {
    if (received > 0) dispersion -= received * std::log(received);
  }
};

}  // namespace kvswap
