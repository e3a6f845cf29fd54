/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Deferral: whether a connection takes its slots with its SYN, or with the ACK that completes the
 * handshake. */
#pragma once

#include "checksum.h"
#include "scratch.h"

/* TCP options (include/net/tcp.h). */
#define TCPOPT_EOL 0
#define TCPOPT_NOP 1
#define TCPOPT_FASTOPEN 34
#define TCPOPT_EXP 254
#define TCPOPT_FASTOPEN_MAGIC 0xf989

/* Whether the scratch's SYN, with all headers copied, may establish a connection before an ACK, by
 * TCP Fast Open (RFC 7413). One with a cookie may do so even without data. */
__noinline int may_fastopen(struct scratch *s)
{
	const struct head *h;
	__u32 end;

	if (!s)
		return 1;
	h = &s->parser.head;
	s->tcp_option = s->parser.packet.l4 + 20;
	end = s->parser.packet.l4 + (load8(h, s->parser.packet.l4 + 12) >> 4 << 2);
	if (s->parser.packet.payload || end > h->copied)
		return 1;
	for (int i = 0; i < 40; i++) {
		__u32 at = *(volatile __u32 *)&s->tcp_option, kind, length;

		if (at >= end)
			break;
		kind = load8(h, at);
		length = kind == TCPOPT_NOP ? 1 : load8(h, at + 1);
		if (kind == TCPOPT_EOL || !length)
			break;
		if (kind == TCPOPT_FASTOPEN || (kind == TCPOPT_EXP && load16(h, at + 2) == TCPOPT_FASTOPEN_MAGIC))
			return 1;
		*(volatile __u32 *)&s->tcp_option = at + length;
	}
	return 0;
}

/* Whether a SYN must not take slots: they are deferred under one of the limits of set, or an
 * earlier handshake was forgotten and may still be completed. */
__noinline int must_defer(const struct policy *p, const struct scratch *s, __u64 set)
{
	int found = 0;

	if (!p || !s)
		return 0;
	for (int i = 0; i < cfg.max_limits && set; i++, set &= set - 1)
		found |= deferral_active(p->limit[lowest_bit(set) % MAX_LIMITS].id, s->now / TICKS_PER_NANO);
	return found || is_forgotten(&s->new_conn.tuple, s->now / TICKS_PER_NANO);
}

/* Decides whether the scratch's SYN takes slots under the limits of set. Where replies take
 * another path, an ACK proves no more than a SYN. */
static __always_inline void decide_deferral(void *ctx, int xdp, const struct policy *p, struct scratch *s, __u64 set)
{
	struct new_conn *nc = &s->new_conn;

	nc->deferred = seen_reply(cfg.attach_id) && must_defer(p, s, set);
	nc->fastopen = nc->deferred && (!copy_headers(ctx, xdp, s) || may_fastopen(s));
}
