# Every dependency but a compiler is optional; the macro KVSWAP_HAS_X is always 0 or 1. Without
# liburing: the thread reader; without Highway: the scalar kernels; without nlohmann-json: no config
# files in C++.
find_package(Threads REQUIRED)
add_library(kvswap_dependencies INTERFACE)
target_link_libraries(kvswap_dependencies INTERFACE Threads::Threads)

function(kvswap_has name found fallback)
  if(found)
    set(value 1)
  else()
    set(value 0)
    message(STATUS "kvswap: ${name} not found, ${fallback}")
  endif()
  target_compile_definitions(kvswap_dependencies INTERFACE KVSWAP_HAS_${name}=${value})
  set(KVSWAP_HAS_${name} ${value} PARENT_SCOPE)
endfunction()

# The archive by its full name: a wheel must not need liburing.so.
find_path(KVSWAP_URING_INCLUDE liburing.h)
find_library(KVSWAP_URING_LIBRARY liburing.a)
if(KVSWAP_URING_INCLUDE AND KVSWAP_URING_LIBRARY)
  target_include_directories(kvswap_dependencies SYSTEM INTERFACE ${KVSWAP_URING_INCLUDE})
  target_link_libraries(kvswap_dependencies INTERFACE ${KVSWAP_URING_LIBRARY})
  kvswap_has(URING TRUE "")
else()
  kvswap_has(URING FALSE "building with the thread reader only (Debian: liburing-dev)")
endif()

# Headers only: the kernels choose their target themselves, so libhwy.so is not needed at run time.
find_path(KVSWAP_HIGHWAY_INCLUDE hwy/highway.h)
if(KVSWAP_HIGHWAY_INCLUDE)
  target_include_directories(kvswap_dependencies SYSTEM INTERFACE ${KVSWAP_HIGHWAY_INCLUDE})
  kvswap_has(HIGHWAY TRUE "")
else()
  kvswap_has(HIGHWAY FALSE "building the scalar kernels only (Debian: libhwy-dev)")
endif()

# Headers only, for files that are JSON: configs and projections.
find_path(KVSWAP_JSON_INCLUDE nlohmann/json.hpp)
set(KVSWAP_HAS_JSON 0)
if(KVSWAP_JSON_INCLUDE)
  set(KVSWAP_HAS_JSON 1)
else()
  message(STATUS
    "kvswap: JSON not found, C++ programs cannot load configs (Debian: nlohmann-json3-dev)")
endif()

# A header of the sources' own: every build writes the same sums into saved caches.
target_include_directories(kvswap_dependencies SYSTEM INTERFACE
  ${PROJECT_SOURCE_DIR}/third_party/xxhash)
kvswap_has(XXHASH TRUE "")
