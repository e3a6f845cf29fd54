/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is known of the packet in hand: what it is, what it is charged, and what is
 * decided over it. */
#pragma once

#include "follow.h"
#include "open.h"
#include "packet.h"

/* As package shaper numbers them. */
enum verdict {
	VERDICT_PASS,
	VERDICT_DELAY,
	VERDICT_REFUSE,
};

enum reason {
	REASON_NONE,
	REASON_RATE,
	REASON_QUEUE_FULL,
	REASON_CONNECTIONS,
	REASON_NEW,
	REASON_WAIT_TIMEOUT,
	REASON_WAITING_FULL,
	REASON_CLIENT_GONE,
	REASON_MEMORY_FULL,
	REASON_BLOCKED,
	REASON_FLOW_CLOSED, /* in the proxy plane alone */
};

#define NO_LIMIT (~0U)

struct decision {
	__u64 depart; /* ticks, not before now */
	__u32 verdict;
	__u32 reason;
	__u32 limit; /* that delayed it longest, or refused it; NO_LIMIT when it passed */
	__u32 mark;  /* it can carry a mark, and waits for more than the limit's mark_delay */
};

#define BOOKED 4 /* slots whose share of a packet is known */

/* What a packet took of a calendar. */
struct booking {
	__u64 depart;	     /* when it may leave */
	__u64 slot;	     /* the number of the first slot */
	__u64 taken[BOOKED]; /* of the first slots */
};

/* What a limit is to charge for a packet, by meter. */
struct charge {
	__u64 cost[METERS];
	__u64 hash[METERS];
	__u64 own[METERS];   /* when a bucket lets it leave, ticks */
	__u32 place[METERS]; /* NOWHERE where it charges nothing */
	__u32 waits;	     /* it makes the packet wait */
	struct booking booking[METER_NEW];
};

/* What does not fit onto the stack. A program runs to its end before the next one
 * begins on the same CPU. */
struct scratch {
	__u64 now;	       /* ticks */
	__u64 ready;	       /* when limits without calendars let it leave */
	__u64 from;	       /* not before that is it to leave by the next one */
	__u64 base;	       /* all before is taken of the calendar in hand */
	__u64 wait;	       /* the longest that one limit makes it wait */
	__u64 asked;	       /* limits that it is under */
	__u32 queue;	       /* that it goes to, in waiting */
	__u32 option;	       /* in hand: its offset */
	__u64 held[METER_NEW]; /* limits whose calendars it has a place in, by meter */
	struct parser parser;
	struct decision decision;
	struct opening opening;
	__u64 watched[METER_NEW]; /* limits of which a bucket is, by meter */
	__u32 until_sample[2];	  /* packets, by kind; 0 when none has come */
	struct charge charge[MAX_LIMITS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");
