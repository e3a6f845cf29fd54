//go:build !linux

package main

func main() { shaperd_needs_Linux() } // undefined, so that the compiler says it
