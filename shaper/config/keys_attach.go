package config

import (
	"time"

	"shaperd.dev/shaperd/shaper"
)

var attachKeys = keys{
	{
		name: "name", typ: nameType, required: true,
		field: fieldOf(func(a *shaper.Attachment) *string { return &a.Name }),
		text:  noText,
		doc:   "Unique among attachments and listeners.",
	},
	{
		name: "interface", typ: arrayType(`string such as "eth0"`, stringType("name", "eth0", ""), parseInterface, asIs), required: true,
		field: fieldOf(func(a *shaper.Attachment) *[]string { return &a.Interfaces }),
		doc: "Names of interfaces, or patterns with `*`, `?` and sets such as `[0-9]`. Interfaces that appear later are " +
			"attached as well.",
	},
	{
		name: "direction", typ: enumType(shaper.Egress, shaper.Ingress), def: `"egress"`,
		field: fieldOf(func(a *shaper.Attachment) *shaper.AttachDirection { return &a.Direction }),
		doc: "`\"egress\"` limits packets that leave through the interface, `\"ingress\"` packets that arrive. For both " +
			"directions, add two attachments.",
	},
	{
		name: "mode", typ: enumType(shaper.AttachShape, shaper.AttachPolice), def: `"shape"`,
		field: fieldOf(func(a *shaper.Attachment) *shaper.AttachMode { return &a.Mode }),
		doc: "`\"shape\"` holds packets until their departure time, and drops packets whose delay would exceed `max_delay`. " +
			"`\"police\"` drops the same packets, and passes the others at once.",
	},
	{
		name: "observe", typ: booleanType, def: "false",
		field: fieldOf(func(a *shaper.Attachment) *bool { return &a.Observe }),
		doc: "A dry run at this attachment: packets are counted and pass. A limit cannot match attachments with different " +
			"values, unless the limit itself has `observe = true`.",
	},
	{
		name: "hook", typ: enumType(shaper.HookAuto, shaper.HookTCX, shaper.HookClsact, shaper.HookXDP), def: `"auto"`,
		field: fieldOf(func(a *shaper.Attachment) *shaper.Hook { return &a.Hook }),
		doc: "Hook in the kernel at which programs run: `\"tcx\"` (Linux 6.6 or later), `\"clsact\"`, or `\"xdp\"` in the " +
			"driver. `\"auto\"` selects tcx if the kernel has it, and clsact otherwise. `\"xdp\"` requires direction " +
			"`\"ingress\"`, and mode `\"police\"` or `observe = true`.",
	},
	{
		name: "on_stop", typ: enumType(shaper.StopOpen, shaper.StopKeep), def: `"open"`,
		field: fieldOf(func(a *shaper.Attachment) *shaper.OnStop { return &a.OnStop }),
		doc: "Behavior while no daemon runs: traffic passes without limits (`\"open\"`), or the last limits stay effective " +
			"(`\"keep\"`).",
	},
	{
		name: "queue", typ: integerType(1000, 10_000_000), def: "100000", needs: []condition{shaping},
		field: fieldOf(func(a *shaper.Attachment) *int { return &a.Queue }),
		doc: "Capacity, in packets, of the queue (fq) of each interface. One key value gets at least three quarters of it " +
			"while no other one waits, and an equal share otherwise.",
	},
	{
		name: "tcp_idle_timeout", typ: durationType(time.Second, 240*time.Hour), def: `"1h"`, needs: []condition{{doc: "a limit with `max_connections` that matches the attachment"}},
		field: fieldOf(func(a *shaper.Attachment) *time.Duration { return &a.IdleTimeout }),
		shown: func(c *Config, record any) bool {
			return len(connectionLimits(c.Limits, record.(*shaper.Attachment).Name)) > 0
		},
		doc: "Time without packets after which a TCP connection no longer counts.",
	},
}

// shaping is the condition that an attachment delays packets.
var shaping = needs("mode `\"shape\"` without `observe = true`", `has no effect without mode "shape" and observe = false`, func(a *shaper.Attachment, _ isSet) bool {
	return a.Shapes()
})
