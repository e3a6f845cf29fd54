//go:build mutants

package cluster

// currentMutant is the rule that is left out. Tests set it while nothing else runs.
var currentMutant string

func mutant(name string) bool { return name == currentMutant }
