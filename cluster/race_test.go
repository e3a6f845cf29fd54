//go:build race

package cluster_test

func init() { slowdown = 10 }
