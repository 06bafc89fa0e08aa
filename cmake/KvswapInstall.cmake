# The wheel's content below kvswap_torch/: libraries in lib/, public headers in include/kvswap/, the
# CMake package in share/cmake/kvswap/, kvswap.pc in lib/pkgconfig/. Only public headers are
# installed; they throw. Without torch the same, less what needs it.
include(CMakePackageConfigHelpers)

# Each stands alone: torch (below torch/ only), the standard library and one another.
set(public_headers
  kvswap/budget.h kvswap/cache.h kvswap/cache_options.h kvswap/cache_report.h kvswap/errors.h
  kvswap/memory_size.h kvswap/model_shape.h kvswap/pass.h kvswap/projection_file.h
  kvswap/safetensors.h kvswap/saved_cache.h kvswap/settings.h kvswap/swap_config.h kvswap/tokens.h)

install(TARGETS kvswap_core ARCHIVE DESTINATION lib)
if(KVSWAP_BUILD_TORCH)
  list(APPEND public_headers torch/query_predictor.h torch/tensor_cache.h)
  install(TARGETS kvswap_torch LIBRARY DESTINATION lib)
  install(FILES ${package_dir}/lib/build_info.json DESTINATION lib)
  if(TARGET _C)
    install(TARGETS _C LIBRARY DESTINATION .)
  endif()
endif()

set(KVSWAP_CORE_LINKS Threads::Threads)
if(KVSWAP_HAS_URING)
  install(FILES ${KVSWAP_URING_LIBRARY} DESTINATION lib)
  list(APPEND KVSWAP_CORE_LINKS "\${kvswap_lib_dir}/liburing.a")
  set(KVSWAP_PC_LINKS "\${libdir}/liburing.a")
endif()
foreach(header IN LISTS public_headers)
  get_filename_component(folder ${header} DIRECTORY)
  string(REGEX REPLACE "^kvswap$" "" folder ${folder})
  install(FILES ${PROJECT_SOURCE_DIR}/csrc/${header} DESTINATION include/kvswap/${folder})
endforeach()

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/kvswapConfig.cmake.in ${CMAKE_BINARY_DIR}/kvswapConfig.cmake
  INSTALL_DESTINATION share/cmake/kvswap)
write_basic_package_version_file(
  ${CMAKE_BINARY_DIR}/kvswapConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_BINARY_DIR}/kvswapConfig.cmake ${CMAKE_BINARY_DIR}/kvswapConfigVersion.cmake
  DESTINATION share/cmake/kvswap)

# Found wherever the folder is put: its place is that of the file itself.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/kvswap.pc @ONLY CONTENT [[prefix=${pcfiledir}/../..
libdir=${prefix}/lib
includedir=${prefix}/include

Name: kvswap
Description: A KV cache that lives on disk, on raw pointers; needs C++20
Version: @PROJECT_VERSION@
Cflags: -I${includedir}
Libs: ${libdir}/libkvswap_core.a @KVSWAP_PC_LINKS@ -pthread
]])
install(FILES ${CMAKE_BINARY_DIR}/kvswap.pc DESTINATION lib/pkgconfig)
