#include "products/multiply_blocks.h"
