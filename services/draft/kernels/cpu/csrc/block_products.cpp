#include "multiply_blocks.h"
