// Marks the symbols that libtessera exports; all others are hidden.
#pragma once

#define TESSERA_API __attribute__((visibility("default")))
