#include "api.cpp"  // without programs, whose functions are bound when they are called, which they are not
