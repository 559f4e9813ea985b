// Loads one module and prints its description, for comm::ask_modules(). Side effects of loading a vendor's library stay
// in this process and end with it.
#include <unistd.h>

#include <string>

#include "tessera/comm/plugins/module_loader.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const int out = ::dup(STDOUT_FILENO);  // the library may print to the original
  if (out < 0 || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return 1;
  const std::string text = tessera::comm::describe_module(arguments[1]);
  for (std::size_t written = 0; written < text.size();) {
    const ssize_t now = ::write(out, text.data() + written, text.size() - written);
    if (now <= 0) return 1;
    written += static_cast<std::size_t>(now);
  }
  ::_exit(0);
}
