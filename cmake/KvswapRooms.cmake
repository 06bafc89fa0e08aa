# A room is a folder of csrc/. Its objects are compiled once; they make the room's own archive, so
# that a test of one room needs only the rooms below it, and kvswap_core, which is what is shipped.
file(WRITE ${CMAKE_BINARY_DIR}/empty.cpp "// Stands in for a room that has no source yet.\n")

# Sums that must have the same bits on every CPU: no product is added before it is rounded.
foreach(source
    kernels/cpu/nearest_centroid kernels/cpu/int4_records methods/clusters/k_means
    methods/clusters/cluster_table)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/csrc/${source}.cpp
    PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
endforeach()

# NESTED: the room has folders of its own.
function(kvswap_add_room room)
  cmake_parse_arguments(arg "NESTED" "SUBDIR" "DEPENDS" ${ARGN})
  if(NOT arg_SUBDIR)
    set(arg_SUBDIR ${room})
  endif()
  set(folder ${PROJECT_SOURCE_DIR}/csrc/${arg_SUBDIR})
  if(arg_NESTED)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  else()
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  endif()
  if(NOT sources)
    set(sources ${CMAKE_BINARY_DIR}/empty.cpp)
  endif()
  add_library(kvswap_${room}_objects OBJECT ${sources})
  target_include_directories(kvswap_${room}_objects PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(kvswap_${room}_objects
    PUBLIC kvswap_dependencies PRIVATE kvswap_options)
  # Of a room that is left out ccache has the objects from the build of the tests.
  set(guard kvswap_hardened)
  if(KVSWAP_SANITIZE AND
      (NOT KVSWAP_SANITIZE_ROOMS OR room MATCHES "^(${KVSWAP_SANITIZE_ROOMS})$"))
    set(guard kvswap_sanitized)
  endif()
  target_link_libraries(kvswap_${room}_objects PRIVATE ${guard})

  add_library(kvswap_${room} STATIC $<TARGET_OBJECTS:kvswap_${room}_objects>)
  set_target_properties(kvswap_${room} PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(kvswap_${room} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(kvswap_${room} PUBLIC kvswap_dependencies)
  foreach(dependency IN LISTS arg_DEPENDS)
    target_link_libraries(kvswap_${room} PUBLIC kvswap_${dependency})
  endforeach()
endfunction()

function(kvswap_add_core)
  set(objects)
  foreach(room IN LISTS ARGN)
    list(APPEND objects $<TARGET_OBJECTS:kvswap_${room}_objects>)
  endforeach()
  add_library(kvswap_core STATIC ${objects})
  set_target_properties(kvswap_core PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(kvswap_core PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(kvswap_core PUBLIC kvswap_dependencies)
endfunction()
