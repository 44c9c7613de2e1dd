// ARM's matrix instructions work on vector registers (dots.h); there is no unit apart.
#pragma once

#include "products/no_matrix_unit.h"
