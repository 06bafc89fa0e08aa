# Cross-build of the torch-free part for 64-bit Arm, its tests run by qemu-user: make test-aarch64.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Highway, xxHash and nlohmann-json are headers, the same for every processor. Of liburing only the
# Arm archive will do, which .ci/aarch64 fetches; without it reads go through threads.
set(fetched ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64-packages/usr)
if(NOT EXISTS ${fetched}/lib/aarch64-linux-gnu/liburing.a)
  set(KVSWAP_URING_LIBRARY KVSWAP_URING_LIBRARY-NOTFOUND CACHE FILEPATH "")
else()
  set(KVSWAP_URING_INCLUDE ${fetched}/include CACHE PATH "")
  set(KVSWAP_URING_LIBRARY ${fetched}/lib/aarch64-linux-gnu/liburing.a CACHE FILEPATH "")
endif()
