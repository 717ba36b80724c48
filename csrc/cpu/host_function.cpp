#include "host_function.h"

#include <dlfcn.h>

namespace moeq::cpu {
namespace {

using Launch = int (*)(void* stream, void (*function)(void*), void* data);  // cuLaunchHostFunc; 0: success

Launch launch_function() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return driver == nullptr ? nullptr : reinterpret_cast<Launch>(dlsym(driver, "cuLaunchHostFunc"));
}

}  // namespace

std::string enqueue_host_function(void* stream, void (*function)(void*), void* data) {
  static const Launch launch = launch_function();
  if (launch == nullptr) return "libcuda.so.1 with cuLaunchHostFunc was not found";
  const int error = launch(stream, function, data);
  return error == 0 ? "" : "cuLaunchHostFunc returned CUresult " + std::to_string(error);
}

}  // namespace moeq::cpu
