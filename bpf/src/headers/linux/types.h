/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The types that linux/bpf.h and bpf_helpers.h are written in. */
#pragma once

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef signed short __s16;
typedef unsigned int __u32;
typedef signed int __s32;
typedef unsigned long long __u64;
typedef signed long long __s64;

typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u16 __sum16;
typedef __u64 __aligned_u64 __attribute__((aligned(8)));
