/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The connections of the proxy. It counts them itself, and knows when they end: an
 * attachment's limits count all others. */
#pragma once

#include "conns.h"
#include "here.h"
#include "packet.h"

#define AF_INET 2
#define AF_INET6 10
#define PACKET_HOST 0

/* The sockets of the proxy's TCP: those that listen, those accepted from them, and
 * those that it connects with. The daemon puts them in; they are out when they are
 * closed, whoever closes them. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, __u32);
} proxied SEC(".maps");

/* Where the proxy listens. XDP cannot see whose a socket is, but where it listens. */
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

/* Whether the packet, at ingress, is for this host. A socket that listens on all
 * addresses is found for one that is to be forwarded too. */
static __noinline int for_host(void *ctx, const struct packet *k, __u32 ifindex)
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

/* Returns the socket that gets the packet. */
static __always_inline struct bpf_sock *receiver(void *ctx, const struct packet *k, __u16 from)
{
	struct bpf_sock_tuple t;

	if (k->ipv4) {
		t.ipv4.saddr = __builtin_bswap32(k->source[3]);
		t.ipv4.daddr = __builtin_bswap32(k->destination[3]);
		t.ipv4.sport = __builtin_bswap16(from);
		t.ipv4.dport = __builtin_bswap16(k->port);
		return bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
#pragma unroll
	for (int i = 0; i < 4; i++) {
		t.ipv6.saddr[i] = __builtin_bswap32(k->source[i]);
		t.ipv6.daddr[i] = __builtin_bswap32(k->destination[i]);
	}
	t.ipv6.sport = __builtin_bswap16(from);
	t.ipv6.dport = __builtin_bswap16(k->port);
	return bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
}

/* Whether the proxy listens where a socket does. volatile keeps each load by itself, as
 * the verifier wants it. */
static __always_inline int at_listener(const volatile struct bpf_sock *sk)
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

/* Whether the proxy gets, at ingress, a segment from a port, or what a SYN begins, of port 0:
 * whatever there is left of an earlier connection with the same ports. */
static __always_inline int to_proxy(void *ctx, const struct packet *k, int xdp, __u32 ifindex, __u16 from)
{
	struct bpf_sock *sk;
	int is = 0;

	if (!for_host(ctx, k, ifindex))
		return 0;
	sk = receiver(ctx, k, from);
	if (!sk)
		return 0;
	if (from || sk->state == BPF_TCP_LISTEN)
		is = xdp ? at_listener(sk) : !!bpf_sk_storage_get(&proxied, sk, 0, 0);
	bpf_sk_release(sk);
	return is;
}

static __noinline int to_proxy_tc(struct __sk_buff *skb, const struct packet *k, __u16 from)
{
	/* A bridge passes on what is for other hosts, whether it forwards or not. */
	return skb->pkt_type == PACKET_HOST && to_proxy(skb, k, 0, interface_of(skb), from);
}

static __noinline int to_proxy_xdp(struct xdp_md *xdp, const struct packet *k)
{
	return to_proxy(xdp, k, 1, ((volatile struct xdp_md *)xdp)->ingress_ifindex, 0);
}

/* Whether the proxy sends the packet, at egress. What is forwarded has no socket. */
static __always_inline int from_proxy(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	return sk && bpf_sk_storage_get(&proxied, sk, 0, 0);
}

/* Whether a segment from a port is of a connection of the proxy, or a SYN begins one, of port 0. */
static __always_inline int is_proxied(void *ctx, int xdp, const struct packet *k, __u16 from)
{
	if (xdp)
		return to_proxy_xdp(ctx, k);
	return here.egress ? from_proxy(ctx) : to_proxy_tc(ctx, k, from);
}

/* Whether a segment at egress, not the first, is of a connection that lives and is not
 * the proxy's. What is forwarded has no socket; neither has what this host answers
 * for a connection that has ended, except that of TIME_WAIT, or of no connection. */
static __always_inline int sent_by_other(struct __sk_buff *skb)
{
	__u32 came_from = ((volatile struct __sk_buff *)skb)->ingress_ifindex;
	struct bpf_sock *sk = skb->sk;

	if (!sk)
		return !!came_from;
	if (sk->state == BPF_TCP_TIME_WAIT || bpf_sk_storage_get(&proxied, sk, 0, 0))
		return 0;
	sk = bpf_sk_fullsock(sk);
	return !(sk && sk->state == BPF_TCP_CLOSE && sk->protocol == IPPROTO_TCP);
}

/* The same at ingress. One for this host that has no socket any more has ended. */
static __noinline int for_other(struct __sk_buff *skb, const struct packet *k)
{
	struct bpf_sock *sk = receiver(skb, k, k->source_port);
	int lives = 0, is = 0;

	if (sk) {
		lives = sk->state != BPF_TCP_LISTEN;
		is = lives && !bpf_sk_storage_get(&proxied, sk, 0, 0);
		bpf_sk_release(sk);
	}
	if (lives)
		return is;
	return skb->pkt_type != PACKET_HOST || !for_host(skb, k, ((volatile struct __sk_buff *)skb)->ifindex);
}

/* Whether a segment that comes back to who began the connection is of one that limits
 * count. */
static __always_inline int of_other(struct __sk_buff *skb, const struct packet *k)
{
	return here.egress ? for_other(skb, k) : sent_by_other(skb);
}
