# Another torch, and another Python, than those that run here: for wheels (tools/wheels).
set(KVSWAP_TORCH_ROOT "" CACHE PATH "a torch package's folder; else that of Python's torch")
set(KVSWAP_PYTHON_INCLUDE "" CACHE PATH "the folder of Python.h; else the running Python's")
set(KVSWAP_PYTHON_SUFFIX "" CACHE STRING "what the module's name ends with, as .cpython-312-....so")
if(NOT KVSWAP_PYTHON_INCLUDE OR NOT KVSWAP_TORCH_ROOT)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
endif()
if(KVSWAP_TORCH_ROOT)
  file(STRINGS ${KVSWAP_TORCH_ROOT}/version.py torch_said REGEX "^(__version__|cuda)")
  string(REGEX MATCH "__version__ = '([^']+)'" matched "${torch_said}")
  set(torch_facts "${KVSWAP_TORCH_ROOT}" "${CMAKE_MATCH_1}")
  if(torch_said MATCHES "cuda: [^=]*= '([0-9.]+)'")
    list(APPEND torch_facts "${CMAKE_MATCH_1}")
  else()
    list(APPEND torch_facts none)
  endif()
else()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import torch; print(torch.__path__[0]); print(torch.__version__); \
print(torch.version.cuda or 'none')"
    OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" torch_facts "${torch_facts}")
endif()
list(GET torch_facts 0 torch_root)
list(GET torch_facts 1 KVSWAP_TORCH_VERSION)
list(GET torch_facts 2 torch_cuda)
if(torch_cuda STREQUAL "none")
  set(has_cuda OFF)
else()
  set(has_cuda ON)
endif()
# The torch that an index gives has CUDA on many machines that have none.
set(builds_cuda ${has_cuda})
if(has_cuda AND NOT KVSWAP_NVCC)
  set(builds_cuda OFF)
endif()
option(KVSWAP_CUDA "Link the CUDA kernels; needs nvcc and a torch with CUDA" ${builds_cuda})
if(has_cuda AND NOT KVSWAP_CUDA)
  message(STATUS "kvswap: builds for the CPU alone, though torch ${KVSWAP_TORCH_VERSION} has CUDA "
    "${torch_cuda}: there is no nvcc, or KVSWAP_CUDA is off. Models on a CUDA device will be refused; "
    "for them install the toolkit or set CUDA_HOME, and build with -DKVSWAP_CUDA=ON")
endif()
if(KVSWAP_CUDA)
  if(NOT has_cuda)
    message(FATAL_ERROR "kvswap: KVSWAP_CUDA needs a torch with CUDA, got ${KVSWAP_TORCH_VERSION}")
  endif()
  if(NOT KVSWAP_NVCC)
    message(FATAL_ERROR "kvswap: torch ${KVSWAP_TORCH_VERSION} has CUDA ${torch_cuda}, but there is "
      "no nvcc; install the toolkit, set CUDA_HOME, or build for the CPU with -DKVSWAP_CUDA=OFF")
  endif()
  kvswap_check_nvcc(${torch_cuda})
endif()
message(STATUS "kvswap: torch ${KVSWAP_TORCH_VERSION} in ${torch_root}")

# Not torch's own CMake package: with CUDA it asks for the whole toolkit (cuBLAS, cuFFT, cuRAND and
# more), of which this needs nvcc and the runtime.
set(torch_lib_dir ${torch_root}/lib)
add_library(kvswap_libtorch INTERFACE)
target_include_directories(kvswap_libtorch SYSTEM INTERFACE
  ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
target_link_libraries(kvswap_libtorch INTERFACE
  ${torch_lib_dir}/libtorch.so ${torch_lib_dir}/libtorch_cpu.so ${torch_lib_dir}/libc10.so)
if(KVSWAP_CUDA)
  target_link_libraries(kvswap_libtorch INTERFACE ${torch_lib_dir}/libc10_cuda.so)
elseif(has_cuda)
  # Its libraries find CUDA's by paths of their own, which the linker does not follow.
  target_link_options(kvswap_libtorch INTERFACE -Wl,--allow-shlib-undefined)
endif()

file(GLOB torch_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/torch/*.cpp)
file(GLOB python_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/python/*.cpp)
if(NOT torch_sources)
  set(torch_sources ${CMAKE_BINARY_DIR}/empty.cpp)
endif()

# The whole of kvswap_core goes in, so that the Python module and LibTorch programs share one copy.
set(KVSWAP_HAS_CUDA 0)
if(KVSWAP_CUDA)
  set(KVSWAP_HAS_CUDA 1)
  file(GLOB glue CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/csrc/torch/cuda/*.cpp ${PROJECT_SOURCE_DIR}/csrc/device/cuda/*.cpp)
  list(APPEND torch_sources ${glue})
endif()
set_source_files_properties(${PROJECT_SOURCE_DIR}/csrc/torch/torch_device.cpp
  PROPERTIES COMPILE_DEFINITIONS KVSWAP_HAS_CUDA=${KVSWAP_HAS_CUDA})
add_library(kvswap_torch SHARED ${torch_sources})
if(KVSWAP_CUDA)
  kvswap_link_cuda(kvswap_torch ${glue})
endif()
target_include_directories(kvswap_torch PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
target_link_libraries(kvswap_torch
  PUBLIC kvswap_libtorch
  PRIVATE kvswap_options kvswap_hardened $<LINK_LIBRARY:WHOLE_ARCHIVE,kvswap_core> kvswap_dependencies)
target_link_options(kvswap_torch PRIVATE -Wl,--exclude-libs,liburing.a -Wl,--no-undefined)

set(targets kvswap_torch)
if(python_sources)
  find_library(KVSWAP_TORCH_PYTHON torch_python PATHS ${torch_lib_dir} NO_DEFAULT_PATH REQUIRED)
  if(KVSWAP_PYTHON_INCLUDE)
    add_library(_C MODULE ${python_sources})
    target_include_directories(_C SYSTEM PRIVATE ${KVSWAP_PYTHON_INCLUDE})
    set_target_properties(_C PROPERTIES PREFIX "" SUFFIX "${KVSWAP_PYTHON_SUFFIX}")
  else()
    Python_add_library(_C MODULE WITH_SOABI ${python_sources})
  endif()
  target_link_libraries(_C PRIVATE kvswap_options kvswap_hardened kvswap_torch kvswap_dependencies
    ${KVSWAP_TORCH_PYTHON})
  target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
  set_target_properties(_C PROPERTIES CXX_VISIBILITY_PRESET hidden)
  list(APPEND targets _C)
endif()

# In the wheel torch is a neighbour in site-packages; in the tree it is where Python found it. Its
# CUDA runtime, which ours must be too, is a neighbour as well: of CUDA 13 and of those before it.
set(cuda_rpath)
if(KVSWAP_CUDA)
  string(REGEX MATCH "^[0-9]+" cuda_major "${torch_cuda}")
  set(cuda_rpath
    ";$ORIGIN/../../nvidia/cu${cuda_major}/lib;$ORIGIN/../../nvidia/cuda_runtime/lib")
endif()
set_target_properties(kvswap_torch PROPERTIES
  BUILD_RPATH "${torch_lib_dir}" INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib${cuda_rpath}")
if(TARGET _C)
  set_target_properties(_C PROPERTIES
    BUILD_RPATH "$ORIGIN/lib;${torch_lib_dir}" INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
endif()
set(package_dir ${CMAKE_BINARY_DIR}/kvswap_torch)
if(KVSWAP_INPLACE)
  set(package_dir ${PROJECT_SOURCE_DIR}/kvswap_torch)
endif()
set_target_properties(kvswap_torch PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir}/lib)
if(TARGET _C)
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir})
endif()
string(TOLOWER "${CMAKE_BUILD_TYPE}" build_type)
file(CONFIGURE OUTPUT ${package_dir}/lib/build_info.json @ONLY CONTENT [[{
  "torch": "@KVSWAP_TORCH_VERSION@",
  "liburing": @KVSWAP_HAS_URING@,
  "highway": @KVSWAP_HAS_HIGHWAY@,
  "xxhash": @KVSWAP_HAS_XXHASH@,
  "json": @KVSWAP_HAS_JSON@,
  "cuda": @KVSWAP_HAS_CUDA@,
  "build_type": "@build_type@"
}
]])
add_custom_target(libraries DEPENDS ${targets})
