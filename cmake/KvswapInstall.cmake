# The wheel's content below kvswap_torch/: libraries in lib/, public headers in include/kvswap/, the
# CMake package in share/cmake/kvswap/. Only public headers are installed; they throw.
include(CMakePackageConfigHelpers)

# Each stands alone: torch (below torch/ only), the standard library and one another.
set(public_headers
  kvswap/budget.h kvswap/cache.h kvswap/cache_options.h kvswap/cache_report.h kvswap/errors.h
  kvswap/memory_size.h kvswap/model_shape.h kvswap/pass.h kvswap/projection_file.h
  kvswap/safetensors.h kvswap/saved_cache.h kvswap/settings.h kvswap/swap_config.h kvswap/tokens.h
  torch/query_predictor.h torch/tensor_cache.h)

install(TARGETS kvswap_torch LIBRARY DESTINATION lib)
install(TARGETS kvswap_core ARCHIVE DESTINATION lib)
if(TARGET _C)
  install(TARGETS _C LIBRARY DESTINATION .)
endif()
install(FILES ${package_dir}/lib/build_info.json DESTINATION lib)

set(KVSWAP_CORE_LINKS Threads::Threads)
if(KVSWAP_HAS_URING)
  install(FILES ${KVSWAP_URING_LIBRARY} DESTINATION lib)
  list(APPEND KVSWAP_CORE_LINKS "\${kvswap_lib_dir}/liburing.a")
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
