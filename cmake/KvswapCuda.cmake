# The CUDA kernels, csrc/kernels/cuda/*.cu. They need the toolkit and nothing else, least of all
# torch. The target cuda_objects compiles them wherever there is an nvcc; KvswapTorch.cmake links them
# where torch has CUDA.
find_program(KVSWAP_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
set(KVSWAP_CUDA_ARCHITECTURES "80;87;90" CACHE STRING "sm_XX to build CUDA kernels for")
if(NOT KVSWAP_NVCC)
  message(STATUS "kvswap: no nvcc, the CUDA kernels are not compiled here")
  return()
endif()
get_filename_component(cuda_root ${KVSWAP_NVCC} REALPATH)
get_filename_component(cuda_root ${cuda_root} DIRECTORY)
get_filename_component(KVSWAP_CUDA_ROOT ${cuda_root} DIRECTORY)

set(nvcc_flags -std=c++20 -O3 -I${PROJECT_SOURCE_DIR}/csrc --expt-relaxed-constexpr
  -Xcompiler=-fPIC,-Wall,-Wextra -Xptxas=-v,-warn-spills --threads=2)
if(KVSWAP_WERROR)
  list(APPEND nvcc_flags -Xcompiler=-Werror -Werror=all-warnings)
endif()
foreach(architecture IN LISTS KVSWAP_CUDA_ARCHITECTURES)
  list(APPEND nvcc_flags -gencode=arch=compute_${architecture},code=sm_${architecture})
endforeach()
# The newest architecture's PTX as well, for devices that come after it.
list(GET KVSWAP_CUDA_ARCHITECTURES -1 newest)
list(APPEND nvcc_flags -gencode=arch=compute_${newest},code=compute_${newest})

# A register spilled is an error. What each kernel takes is written beside its object.
file(GLOB cuda_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/*.cu)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)
set(cuda_objects)
foreach(source IN LISTS cuda_kernels)
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${PROJECT_SOURCE_DIR}/cmake/run_logged.sh ${object}.ptxas
      ${KVSWAP_LAUNCHER} ${KVSWAP_NVCC} ${nvcc_flags} -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d VERBATIM COMMENT "nvcc ${name}.cu")
  list(APPEND cuda_objects ${object})
endforeach()
add_custom_target(cuda_objects DEPENDS ${cuda_objects})

# One process takes one CUDA runtime: the one of nvcc's major version is to be torch's.
function(kvswap_check_nvcc torch_cuda)
  execute_process(COMMAND ${KVSWAP_NVCC} --version OUTPUT_VARIABLE told
    COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" release "${told}")
  set(nvcc_major ${CMAKE_MATCH_1})
  string(REGEX MATCH "^[0-9]+" torch_major "${torch_cuda}")
  if(NOT nvcc_major STREQUAL torch_major)
    message(FATAL_ERROR "kvswap: nvcc must be of CUDA ${torch_major}, which torch is built with "
      "(${torch_cuda}), got ${KVSWAP_NVCC}: ${release}; set CUDA_HOME to such a toolkit, or build "
      "for the CPU with -DKVSWAP_CUDA=OFF")
  endif()
endfunction()

# CUDA's headers are seen by the sources that are named alone: the others compile as without CUDA,
# and the compiler's cache has them.
function(kvswap_link_cuda target)
  target_sources(${target} PRIVATE ${cuda_objects})
  set_source_files_properties(${cuda_objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  # nvcc may be a link or a script elsewhere, so the usual places come after its own.
  set(places ${KVSWAP_CUDA_ROOT} $ENV{CUDA_HOME} /usr/local/cuda)
  find_path(KVSWAP_CUDA_INCLUDE cuda_runtime_api.h HINTS ${places} PATH_SUFFIXES include REQUIRED)
  find_library(KVSWAP_CUDART cudart HINTS ${places} PATH_SUFFIXES lib64 lib REQUIRED)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem ${KVSWAP_CUDA_INCLUDE})
  target_link_libraries(${target} PRIVATE ${KVSWAP_CUDART})
endfunction()
