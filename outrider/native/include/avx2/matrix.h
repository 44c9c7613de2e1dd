// AVX2 processors have no matrix unit.
#pragma once

#include "products/no_matrix_unit.h"
