// Marks the symbols that the libraries export; all others are hidden.
#pragma once

#define TESSERA_API __attribute__((visibility("default")))
