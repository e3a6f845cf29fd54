package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

func blocksCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "blocks",
		Short:       "List blocked prefixes",
		Long:        `List the blocked source prefixes, and the end of each block.`,
		Example:     `  shaperd blocks`,
		Annotations: jsonAnnotations,
		Args:        noArgs(`: to block one, use "shaperd block PREFIX"`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			blocks, err := e.client().Blocks(cmd.Context())
			if err != nil {
				return err
			}
			return e.showBlocks(blocks)
		},
	}
}

func (e env) showBlocks(blocks []api.Block) error {
	return e.show(blocks, func(p *term.Printer) {
		if len(blocks) == 0 {
			p.Line("No prefix is blocked.")
		}
		p.Table(blocksTable(blocks, time.Now()))
	})
}

func blocksTable(blocks []api.Block, now time.Time) *term.Table {
	t := term.NewTable("BLOCKED", "SINCE", "UNTIL")
	for _, b := range blocks {
		t.Add(b.Prefix, term.Clock(b.Since, now), strings.TrimPrefix(term.Until(b.Until, now, `"shaperd unblock"`), "until "))
	}
	return t
}

func blockCommand(e env) *cobra.Command {
	var forTime durationFlag
	var file string
	cmd := &cobra.Command{
		Use:   "block {PREFIX | --file LIST}",
		Short: "Block a source prefix, or a list of them",
		Long: `Block all traffic from a source address or prefix: refuse new connections and
datagrams, and reset open connections. A block ends after --for, or with "shaperd
unblock". It survives reloads, and also restarts if "run" has --state. A second block of
the same prefix never shortens the first one: to shorten it, unblock the prefix first.
Blocks are enforced in every mode, also while the daemon observes and during a bypass.

With --file, block all prefixes of a list at once. The list has one prefix per line, and
comments after "#". "-" is standard input. If a line is invalid, nothing changes. Up to
100000 prefixes may be blocked.`,
		Example: `  shaperd block 192.0.2.0/24 --for 10m
  shaperd block 2001:db8::7
  shaperd block --file drop.txt --for 1d`,
		Annotations: changeAnnotations,
		Args:        prefixOrFile(&file),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file != "" {
				list, err := e.readPrefixes(file)
				if err != nil {
					return err
				}
				return e.changeBlocks(cmd.Context(), api.ChangeBlocks{Block: list, Duration: forTime.seconds()})
			}
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.client()
			if err := c.Block(cmd.Context(), api.SetBlock{Prefix: prefix.String(), Duration: forTime.seconds()}); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterChange(err)
			}
			return e.showBlocks(blocks)
		},
	}
	addForFlag(cmd, &forTime, "block", `until "shaperd unblock"`)
	cmd.Flags().StringVar(&file, "file", "", "block the prefixes in this `list`")
	return cmd
}

func unblockCommand(e env) *cobra.Command {
	var file string
	keep := false
	cmd := &cobra.Command{
		Use:   "unblock {PREFIX | --file LIST}",
		Short: "Remove a block, or the blocks of a list",
		Long: `Remove the block of a prefix that "shaperd blocks" lists. With --file, remove the blocks
of all prefixes in a list, in the format of "shaperd block". Prefixes that are not
blocked are ignored.

--keep-permanent is for programs that end their own timed blocks: it keeps blocks without
an end, which operators have made.`,
		Example: `  shaperd unblock 192.0.2.0/24
  shaperd unblock --file drop.txt`,
		Annotations: changeAnnotations,
		Args:        prefixOrFile(&file),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			blocks, err := e.client().Blocks(cmd.Context())
			var prefixes []string
			for _, b := range blocks {
				prefixes = append(prefixes, b.Prefix)
			}
			if err != nil || len(args) > 0 {
				prefixes = nil
			}
			return prefixes, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if file != "" {
				list, err := e.readPrefixes(file)
				if err != nil {
					return err
				}
				return e.changeBlocks(cmd.Context(), api.ChangeBlocks{Unblock: list, KeepPermanent: keep})
			}
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.client()
			if err := c.Unblock(cmd.Context(), prefix.String()); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterChange(err)
			}
			return e.showBlocks(blocks)
		},
	}
	cmd.Flags().BoolVar(&keep, "keep-permanent", false, "with --file, keep blocks without an end")
	cmd.Flags().StringVar(&file, "file", "", "unblock the prefixes in this `list`")
	return cmd
}

// prefixOrFile requires a prefix, or a file in its place.
func prefixOrFile(file *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case *file == "":
			return wantArgs("PREFIX")(cmd, args)
		case len(args) > 0:
			return fmt.Errorf("%s takes a prefix or --file, not both", cmd.Name())
		}
		return nil
	}
}

// readPrefixes reads a list of prefixes from a file, or with "-" from standard input.
func (e env) readPrefixes(file string) (list []string, err error) {
	in := e.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	} else if in == nil {
		in = strings.NewReader("")
	}
	text, err := io.ReadAll(io.LimitReader(in, config.MaxSourceFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if len(text) > config.MaxSourceFile {
		return nil, fmt.Errorf("%s: larger than %d MiB", file, config.MaxSourceFile>>20)
	}
	prefixes, err := config.ParseGroup(file, string(text))
	for _, p := range prefixes {
		list = append(list, p.String())
	}
	return list, err
}

func (e env) changeBlocks(ctx context.Context, change api.ChangeBlocks) error {
	did, err := e.client().ChangeBlocks(ctx, change)
	if err != nil {
		return err
	}
	return e.show(did, func(p *term.Printer) {
		verb, n := "blocked", did.Blocked
		if len(change.Unblock) > 0 {
			verb, n = "unblocked", did.Unblocked
		}
		p.Line("%d of %d %s; %d are blocked in all.", n, max(len(change.Block), len(change.Unblock)), verb, did.Total)
	})
}

// parsePrefix parses a prefix of the command line.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := shaper.ParsePrefix(s)
	if err != nil {
		return p, usageError{fmt.Errorf("%q %w", s, err)}
	}
	return p, nil
}
