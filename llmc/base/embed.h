// Files of the repository, or of the build, inside the program.
#pragma once

// symbol[] to symbol_end = the bytes of the file at `path`, which the assembler copies; relative to where the compiler
// runs or to its -Wa,-I.
#define EMBED(symbol, path)                                                                      \
  asm(".section .rodata\n" #symbol ": .incbin \"" path "\"\n" #symbol "_end: .byte 0\n.text\n"); \
  extern "C" const char symbol[], symbol##_end[]
