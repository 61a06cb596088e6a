// Every operator of ATen, for those who compute with it. Large: the build precompiles it and includes it first.
#pragma once

#include <ATen/ATen.h>
