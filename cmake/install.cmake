# `cmake --install` installs the library, its public headers, the package for find_package(tessera), and the tool.
# The library's dependencies are private, so the exported target has none.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS tessera_comm_library EXPORT tesseraTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(NOT TESSERA_COMM_ONLY)
  install(TARGETS tessera EXPORT tesseraTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

tessera_public_headers(headers)
if(NOT TARGET tessera_libtorch_library)
  list(FILTER headers EXCLUDE REGEX "^libtorch/")
endif()
foreach(header ${headers})
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/src/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera/${folder})
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir})
if(TARGET tessera_libtorch_library)  # a component of the package: who doesn't name it needs no Torch
  install(TARGETS tessera_libtorch_library EXPORT tesseraLibtorchTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT tesseraLibtorchTargets NAMESPACE tessera:: DESTINATION ${package_dir})
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/torch.cmake DESTINATION ${package_dir})
endif()
get_property(TESSERA_TORCH_VERSION GLOBAL PROPERTY TESSERA_TORCH_VERSION)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/tesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/cmake/tesseraConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/module.cmake
  DESTINATION ${package_dir})

if(TARGET tessera_tool)
  file(RELATIVE_PATH to_library /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(tessera_tool PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/${to_library}")  # first as in the build tree
  tessera_final_rpath(tessera_tool)
  install(TARGETS tessera_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# The loadable modules, and the program that probes them.
set(module_dir ${CMAKE_INSTALL_LIBDIR}/tessera-modules)
get_property(modules GLOBAL PROPERTY TESSERA_BACKEND_MODULES)
if(modules)
  install(TARGETS ${modules} LIBRARY DESTINATION ${module_dir})
endif()
get_property(devices GLOBAL PROPERTY TESSERA_DEVICE_MODULES)
if(devices)
  install(TARGETS ${devices} LIBRARY DESTINATION ${module_dir}/devices)
endif()
install(TARGETS tessera_module_probe RUNTIME DESTINATION ${module_dir})
if(TARGET tessera_tool)
  install(TARGETS tessera_rank_guard tessera_rank_start RUNTIME DESTINATION ${module_dir})
  if(TARGET tessera_loopback_bind)
    install(TARGETS tessera_loopback_bind LIBRARY DESTINATION ${module_dir}/launch)
  endif()
endif()
