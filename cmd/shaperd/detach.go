package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"shaperd/bpf"
)

func detachCommand(e env) *cobra.Command {
	var pins string
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Take away what a daemon left attached to interfaces",
		Long: `Take away every program, map, queue and link that a daemon left at interfaces when
it was killed, or that on_stop = "keep" left enforced. A daemon that runs takes them
away itself, when its configuration does not name them any more.`,
		Example: `  systemctl stop shaperd && shaperd detach`,
		Args:    noArgs(""),
		RunE: func(*cobra.Command, []string) error {
			if !filepath.IsAbs(pins) {
				return usageError{fmt.Errorf("--pins %q: an absolute path is needed", pins)}
			}
			if !bpf.Pinned(pins) {
				fmt.Fprintf(e.stdout, "nothing of shaperd is pinned in %s\n", pins)
				return nil
			}
			if bpf.Alive(pins) {
				return errors.New("a daemon runs: stop it first, or take the attachments out of its configuration and reload it; " +
					"one that does not end is killed by \"systemctl kill --signal=KILL shaperd\"")
			}
			if err := bpf.Detach(pins); err != nil {
				return err
			}
			fmt.Fprintf(e.stdout, "detached all of %s\n", pins)
			return nil
		},
	}
	cmd.Flags().StringVar(&pins, "pins", "/sys/fs/bpf/shaperd", "`folder` of [daemon] pin_path")
	return cmd
}
