package bpf

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -go-package bpf -target bpfel -type policy -type limit -type meter -type segments -type line -type line4 -type line6 -type node6 -type bucket_line -type calendar -type counters -type table_count -type conn -type tuple -type slot_line -type listener -type monitor_pair -type sample -type losses -type uncounted -type queue kernel src/shaperd.c -- -O2 -mcpu=v3 -nostdinc -Isrc/headers -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare
