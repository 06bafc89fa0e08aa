set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -g1 -DNDEBUG")

find_program(KVSWAP_CCACHE ccache)
if(KVSWAP_CCACHE)
  # Development, torch-free and wheel builds compile the same text, of this clone and of others:
  # one serves the others.
  set(KVSWAP_LAUNCHER env CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${KVSWAP_CCACHE})
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${KVSWAP_LAUNCHER})
  endif()
endif()

# What every target of ours is compiled with; dependencies' headers come in as SYSTEM.
add_library(kvswap_options INTERFACE)
# A newer compiler's warnings are ours to see, and stop nobody who only installs this.
option(KVSWAP_WERROR "warnings are errors" ${PROJECT_IS_TOP_LEVEL})
target_compile_options(kvswap_options INTERFACE -Wall -Wextra $<$<BOOL:${KVSWAP_WERROR}>:-Werror>)

# What libraries are hardened by, where the compiler has it; instrumented rooms look for the same, and
# for more. What checks a buffer needs optimised code. -U: some compilers define a level of their own.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)
add_library(kvswap_hardened INTERFACE)
foreach(flag -fstack-protector-strong -fcf-protection)
  string(MAKE_C_IDENTIFIER "KVSWAP_HAS${flag}" has_flag)
  check_cxx_compiler_flag(${flag} ${has_flag})
  if(${has_flag})
    target_compile_options(kvswap_hardened INTERFACE ${flag})
  endif()
endforeach()
# A C library warns of a level that it does not have with this compiler.
set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
check_cxx_source_compiles("#include <cstdlib>\nint main() {}" KVSWAP_HAS_FORTIFY_3)
unset(CMAKE_REQUIRED_FLAGS)
set(fortify 2)
if(KVSWAP_HAS_FORTIFY_3)
  set(fortify 3)
endif()
target_compile_options(kvswap_hardened INTERFACE
  $<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE$<SEMICOLON>-D_FORTIFY_SOURCE=${fortify}>)
target_link_options(kvswap_hardened INTERFACE LINKER:-z,relro LINKER:-z,now)

# What includes torch is not instrumented: what it hands to the rooms below is checked there.
add_library(kvswap_sanitized INTERFACE)
if(KVSWAP_SANITIZE)
  if(NOT KVSWAP_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "KVSWAP_SANITIZE: must be address, undefined, both with a comma, or thread, "
      "got '${KVSWAP_SANITIZE}'")
  endif()
  target_compile_options(kvswap_sanitized INTERFACE -fsanitize=${KVSWAP_SANITIZE}
    -fno-sanitize-recover=all -fno-omit-frame-pointer ${KVSWAP_SANITIZE_OPTIONS})
  target_link_options(kvswap_options INTERFACE -fsanitize=${KVSWAP_SANITIZE})
endif()
