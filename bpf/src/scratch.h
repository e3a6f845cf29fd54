/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The per-CPU scratch: the packet in hand, its charges and its decision. */
#pragma once

#include "conn_track.h"
#include "conn_insert.h"
#include "packet.h"

/* Numbered as in package shaper. */
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
	REASON_FLOW_CLOSED, /* proxy plane only */
	REASON_SHED,	    /* proxy plane only */
	REASON_QUOTA_USED,  /* proxy plane only */
};

#define NO_LIMIT (~0U)

struct decision {
	__u64 depart; /* ticks, not before now */
	__u32 verdict;
	__u32 reason;
	__u32 limit; /* the limit that delayed it longest or refused it; NO_LIMIT if none */
	__u32 mark;  /* mark CE: ECN-capable, and delayed by more than the limit's mark_delay */
};

#define BOOKED_SLOTS 4 /* slots of a booking that can be undone */

/* A packet's booking in a calendar. */
struct booking {
	__u64 depart;		   /* departure time, ticks */
	__u64 slot;		   /* number of the first slot */
	__u64 taken[BOOKED_SLOTS]; /* ticks, in the first slots */
};

/* A limit's charges for the packet, by meter. */
struct charge {
	__u64 cost[METERS];
	__u64 hash[METERS];
	__u64 depart[METER_NEW]; /* departure time by the bucket, ticks */
	__u64 conn_clock;	 /* time by the clock of the bucket of new connections, ticks */
	__u32 index[METERS];	 /* of the bucket; NO_INDEX where nothing is charged; see HOT_INDEX */
	__u32 delays;		 /* the limit delays the packet */
	struct booking booking[METER_NEW];
};

/* What does not fit onto the stack. A program is not interrupted by another one on the same CPU. */
struct scratch {
	__u64 now;		 /* ticks */
	__u64 suspended;	 /* by how much CLOCK_BOOTTIME is ahead of it, where hosts share a limit that matches */
	__u64 ready;		 /* departure time by the limits without calendars */
	__u64 not_before;	 /* earliest departure in the calendar in hand */
	__u64 calendar_base;	 /* the calendar in hand is taken up to here */
	__u64 longest_wait;	 /* the longest delay by one limit */
	__u64 limits;		 /* limits that match */
	__u32 queue;		 /* index into queue_counts */
	__u32 tcp_option;	 /* offset of the TCP option in hand */
	__u64 booked[METER_NEW]; /* limits with bookings, by meter */
	struct parser parser;
	struct decision decision;
	struct new_conn new_conn;
	__u64 monitored[METER_NEW]; /* limits whose bucket is monitored, by meter */
	__u32 sample_in[2];	    /* packets to the next sample, by kind; 0 before the first packet */
	struct charge charge[MAX_LIMITS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

/* When the scratch's packet leaves, by all limits. */
static __always_inline __u64 final_depart(const struct scratch *s)
{
	return time_max(s->decision.depart, time_max(s->new_conn.depart, s->new_conn.earliest * TICKS_PER_NANO));
}
