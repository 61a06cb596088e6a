// All operators of ATen. Large: the build precompiles it and includes it first.
#pragma once

#include <ATen/ATen.h>
