/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The arithmetic of package leaky, statement for statement. A Bucket of that package is two
 * virtual times, of bytes and of packets; here each is a separate word. Times and costs are in
 * ticks of 1/64 ns.
 *
 * CPUs share buckets, so atomic operations replace the lock of package leaky: see
 * bucket_try_charge. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define TICKS_PER_NANO 64ULL
#define FOREVER (1ULL << 62)

/* A rate: one unit costs mult / 2^shift ticks. mult is 0 for an unlimited rate; max is the largest
 * n whose cost rate_cost computes in 64 bits. */
struct rate {
	__u64 mult;
	__u64 max;
	__u64 shift;
};

static __always_inline __u64 time_sub(__u64 t, __u64 u)
{
	return t < u ? 0 : t - u;
}

static __always_inline __u64 time_add(__u64 t, __u64 d)
{
	__u64 sum = t + d;

	return sum >= t ? sum : ~0ULL;
}

static __always_inline __u64 time_max(__u64 t, __u64 u)
{
	return t > u ? t : u;
}

static __always_inline __u64 time_min(__u64 t, __u64 u)
{
	return t < u ? t : u;
}

/* The cost of n units, computed in 128 bits; at most FOREVER. */
__noinline __u64 rate_big_cost(__u64 mult, __u64 shift, __u64 n)
{
	__u64 lo_lo = (n & 0xffffffff) * (mult & 0xffffffff);
	__u64 lo_hi = (n & 0xffffffff) * (mult >> 32);
	__u64 hi_lo = (n >> 32) * (mult & 0xffffffff);
	__u64 hi_hi = (n >> 32) * (mult >> 32);
	__u64 mid = (lo_lo >> 32) + (lo_hi & 0xffffffff) + hi_lo;
	__u64 lo = mid << 32 | (lo_lo & 0xffffffff);
	__u64 hi = hi_hi + (lo_hi >> 32) + (mid >> 32);
	__u64 up = (1ULL << (shift & 63)) - 1;

	lo += up;
	hi += lo < up;
	shift &= 63;
	if (hi >> shift)
		return FOREVER;
	if (shift)
		lo = hi << (64 - shift) | lo >> shift;
	return lo < FOREVER ? lo : FOREVER;
}

/* The cost of n units, rounded up; at most FOREVER. */
static __always_inline __u64 rate_cost(const struct rate *r, __u64 n)
{
	if (n > r->max)
		return rate_big_cost(r->mult, r->shift, n);
	return (n * r->mult + ((1ULL << (r->shift & 63)) - 1)) >> (r->shift & 63);
}

/* The earliest instant, not before now, at which the next unit may leave. */
static __always_inline __u64 bucket_depart(__u64 t, __u64 burst, __u64 now)
{
	return time_max(now, time_sub(t, burst));
}

/* The clock of a bucket that lets units pass in fixed windows: the end of the present one. With a window of 0 it is now. */
static __always_inline __u64 window_clock(__u64 window, __u64 now)
{
	return window ? time_add(now - now % window, window) : now;
}

/* bucket_depart, for a bucket that lets units pass in fixed windows unless window is 0. */
static __always_inline __u64 window_depart(__u64 t, __u64 burst, __u64 window, __u64 now)
{
	__u64 ready = time_sub(t, burst);

	if (!window)
		return time_max(now, ready);
	if (ready <= window_clock(window, now))
		return now;
	return time_add(ready, window - 1) / window * window - window;
}

/* Charges a unit that leaves, or is enqueued, at now:
 *
 *	t = max(t, now) + cost
 *
 * in one atomic step, and sets before to the old t. A bucket with a backlog takes an atomic
 * addition, which cannot fail. A drained one takes a compare-and-swap, which fails if another CPU
 * has just charged it. Returns whether the bucket was charged. */
static __always_inline int bucket_try_charge(__u64 *bucket, __u64 cost, __u64 now, __u64 *before)
{
	__u64 t = *(volatile __u64 *)bucket;

	if (t >= now) {
		*before = __sync_fetch_and_add(bucket, cost);
		return 1;
	}
	*before = t;
	return __sync_val_compare_and_swap(bucket, t, now + cost) == t;
}

/* Charges a unit, with retries, and returns the old t. */
static __always_inline __u64 bucket_charge(__u64 *bucket, __u64 cost, __u64 now)
{
	__u64 before;

	for (int i = 0; i < 4; i++) {
		if (bucket_try_charge(bucket, cost, now, &before))
			return before;
	}
	return __sync_fetch_and_add(bucket, cost);
}

/* Refunds a charge. Does nothing if a change of the rate has left less than that: a bucket below 0
 * would never drain. */
static __always_inline void bucket_refund(__u64 *bucket, __u64 cost)
{
	if (__sync_fetch_and_sub(bucket, cost) < cost)
		__sync_fetch_and_add(bucket, cost);
}

/* Raises a bucket's virtual time to t, if it is less. */
static __always_inline void bucket_raise(__u64 *bucket, __u64 t)
{
	__u64 cur = *(volatile __u64 *)bucket;

	for (int i = 0; i < 16; i++) {
		__u64 old = cur;

		if (old >= t)
			return;
		cur = __sync_val_compare_and_swap(bucket, old, t);
		if (cur == old)
			return;
	}
}
