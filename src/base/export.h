// Marks what libtessera exports; everything else is hidden.
#pragma once

#define TESSERA_API __attribute__((visibility("default")))
