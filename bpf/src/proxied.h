/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Proxied connections. The proxy counts them itself and knows when they end, so an attachment's
 * limits count only others. */
#pragma once

#include "conntrack.h"
#include "config.h"
#include "packet.h"

#define AF_INET 2
#define AF_INET6 10
#define PACKET_HOST 0

/* The proxy's TCP sockets: listening, accepted and connecting ones. The daemon adds them; the
 * kernel removes them when they are closed. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, __u32);
} proxied SEC(".maps");

/* Where the proxy listens. XDP cannot see the owner of a socket, only its address. */
struct listener {
	__u32 address[4]; /* as in struct packet */
	__u32 port;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct listener);
	__type(value, __u32);
} listeners SEC(".maps");

/* Whether a packet at ingress is for this host. Without this check, a wildcard listener would
 * match forwarded packets too. */
static __noinline int is_local(void *ctx, const struct packet *k, __u32 ifindex)
{
	struct bpf_fib_lookup fib = { .ifindex = ifindex, .l4_protocol = k->transport };
	int result;

	fib.sport = __builtin_bswap16(k->source_port);
	fib.dport = __builtin_bswap16(k->port);
	if (k->ipv4) {
		fib.family = AF_INET;
		fib.ipv4_src = __builtin_bswap32(k->source[3]);
		fib.ipv4_dst = __builtin_bswap32(k->destination[3]);
	} else {
		fib.family = AF_INET6;
#pragma unroll
		for (int i = 0; i < 4; i++) {
			fib.ipv6_src[i] = __builtin_bswap32(k->source[i]);
			fib.ipv6_dst[i] = __builtin_bswap32(k->destination[i]);
		}
	}
	/* Where the interface does not forward, what comes in is for this host. */
	result = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	return result == BPF_FIB_LKUP_RET_NOT_FWDED || result == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* Returns the socket that receives the packet. */
static __always_inline struct bpf_sock *lookup_socket(void *ctx, const struct packet *k, __u16 source_port)
{
	struct bpf_sock_tuple t;

	if (k->ipv4) {
		t.ipv4.saddr = __builtin_bswap32(k->source[3]);
		t.ipv4.daddr = __builtin_bswap32(k->destination[3]);
		t.ipv4.sport = __builtin_bswap16(source_port);
		t.ipv4.dport = __builtin_bswap16(k->port);
		return bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
#pragma unroll
	for (int i = 0; i < 4; i++) {
		t.ipv6.saddr[i] = __builtin_bswap32(k->source[i]);
		t.ipv6.daddr[i] = __builtin_bswap32(k->destination[i]);
	}
	t.ipv6.sport = __builtin_bswap16(source_port);
	t.ipv6.dport = __builtin_bswap16(k->port);
	return bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
}

/* Whether the proxy listens at the socket's address. volatile: the verifier requires the loads one
 * by one. */
static __always_inline int is_listener(const volatile struct bpf_sock *sk)
{
	struct listener l = { .port = sk->src_port };
	__u32 address4 = sk->src_ip4;

#pragma unroll
	for (int i = 0; i < 4; i++)
		l.address[i] = __builtin_bswap32(sk->src_ip6[i]);
	if (sk->family == AF_INET) {
		l.address[0] = l.address[1] = 0;
		l.address[2] = 0xffff;
		l.address[3] = __builtin_bswap32(address4);
	}
	return !!bpf_map_lookup_elem(&listeners, &l);
}

/* Whether the proxy receives the segment, at ingress. A source_port of 0 looks only for a
 * listener, for a SYN: an earlier connection may have had the same ports. */
static __always_inline int to_proxy(void *ctx, const struct packet *k, int xdp, __u32 ifindex, __u16 source_port)
{
	struct bpf_sock *sk;
	int found = 0;

	if (!is_local(ctx, k, ifindex))
		return 0;
	sk = lookup_socket(ctx, k, source_port);
	if (!sk)
		return 0;
	if (source_port || sk->state == BPF_TCP_LISTEN)
		found = xdp ? is_listener(sk) : !!bpf_sk_storage_get(&proxied, sk, 0, 0);
	bpf_sk_release(sk);
	return found;
}

static __noinline int to_proxy_tc(struct __sk_buff *skb, const struct packet *k, __u16 source_port)
{
	/* A bridge passes on packets for other hosts, even if the host does not forward. */
	return skb->pkt_type == PACKET_HOST && to_proxy(skb, k, 0, ifindex_of(skb), source_port);
}

static __noinline int to_proxy_xdp(struct xdp_md *xdp, const struct packet *k)
{
	return to_proxy(xdp, k, 1, ((volatile struct xdp_md *)xdp)->ingress_ifindex, 0);
}

/* Whether the proxy sends the packet, at egress. Forwarded packets have no socket. */
static __always_inline int from_proxy(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	return sk && bpf_sk_storage_get(&proxied, sk, 0, 0);
}

/* Whether the segment is of a proxied connection, or with a source_port of 0, whether the SYN
 * begins one. */
static __always_inline int is_proxied(void *ctx, int xdp, const struct packet *k, __u16 source_port)
{
	if (xdp)
		return to_proxy_xdp(ctx, k);
	return cfg.egress ? from_proxy(ctx) : to_proxy_tc(ctx, k, source_port);
}

/* Whether a segment at egress, not the first one, is of a live connection that is not proxied.
 * Forwarded packets have no socket. Neither have this host's replies for closed connections,
 * except those from TIME_WAIT, or for unknown ones. */
static __always_inline int sent_unproxied(struct __sk_buff *skb)
{
	__u32 ingress = ((volatile struct __sk_buff *)skb)->ingress_ifindex;
	struct bpf_sock *sk = skb->sk;

	if (!sk)
		return !!ingress;
	if (sk->state == BPF_TCP_TIME_WAIT || bpf_sk_storage_get(&proxied, sk, 0, 0))
		return 0;
	sk = bpf_sk_fullsock(sk);
	return !(sk && sk->state == BPF_TCP_CLOSE && sk->protocol == IPPROTO_TCP);
}

/* The same at ingress: a segment for this host without a socket is of a closed connection. */
static __noinline int received_unproxied(struct __sk_buff *skb, const struct packet *k)
{
	struct bpf_sock *sk = lookup_socket(skb, k, k->source_port);
	int live = 0, other = 0;

	if (sk) {
		live = sk->state != BPF_TCP_LISTEN;
		other = live && !bpf_sk_storage_get(&proxied, sk, 0, 0);
		bpf_sk_release(sk);
	}
	if (live)
		return other;
	return skb->pkt_type != PACKET_HOST || !is_local(skb, k, ((volatile struct __sk_buff *)skb)->ifindex);
}

/* Whether a segment in the reply direction is of a connection that limits count. */
static __always_inline int is_unproxied(struct __sk_buff *skb, const struct packet *k)
{
	return cfg.egress ? received_unproxied(skb, k) : sent_unproxied(skb);
}
