/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether a connection gets its slots when it begins, or when its handshake is complete. */
#pragma once

#include "checksum.h"
#include "scratch.h"

/* Options of TCP (include/net/tcp.h). */
#define TCPOPT_EOL 0
#define TCPOPT_NOP 1
#define TCPOPT_FASTOPEN 34
#define TCPOPT_EXP 254
#define TCPOPT_FASTOPEN_MAGIC 0xf989

/* Whether the scratch's SYN, all of whose headers are copied, may establish a connection by
 * itself, when the responder takes its data: TCP Fast Open (RFC 7413). A cookie for it needs
 * no data. */
__noinline int opens_fast(struct scratch *s)
{
	const struct head *h;
	__u32 end;

	if (!s)
		return 1;
	h = &s->parser.head;
	s->option = s->parser.packet.l4 + 20;
	end = s->parser.packet.l4 + (load8(h, s->parser.packet.l4 + 12) >> 4 << 2);
	if (s->parser.packet.payload || end > h->have)
		return 1;
	for (int i = 0; i < 40; i++) {
		__u32 at = *(volatile __u32 *)&s->option, kind, length;

		if (at >= end)
			break;
		kind = load8(h, at);
		length = kind == TCPOPT_NOP ? 1 : load8(h, at + 1);
		if (kind == TCPOPT_EOL || !length)
			break;
		if (kind == TCPOPT_FASTOPEN || (kind == TCPOPT_EXP && load16(h, at + 2) == TCPOPT_FASTOPEN_MAGIC))
			return 1;
		*(volatile __u32 *)&s->option = at + length;
	}
	return 0;
}

/* Whether the scratch's SYN reserves no slots: none do under one of the limits of set, or an
 * earlier handshake may still be completed. */
__noinline int suspicious(const struct policy *p, const struct scratch *s, __u64 set)
{
	int found = 0;

	if (!p || !s)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1)
		found |= is_suspected(p->limit[lowest(set) % MAX_LIMITS].state, s->now / TICKS_PER_NANO);
	return found || is_forgotten(&s->opening.tuple, s->now / TICKS_PER_NANO);
}

/* Finds out whether the scratch's SYN, which limits of set count, is to reserve slots. Where
 * no reply comes back, an ACK tells no more than a SYN. */
static __always_inline void may_reserve(void *ctx, int xdp, const struct policy *p, struct scratch *s, __u64 set)
{
	struct opening *o = &s->opening;

	o->unreserved = has_replied(here.place) && suspicious(p, s, set);
	o->fast = o->unreserved && (!complete(ctx, xdp, s) || opens_fast(s));
}
