#!/bin/sh
# A C++ compiler whose shared libraries keep to themselves what they take from archives.
#
# Where no shared libstdc++ lies beside the compiler it links the archive, and AOTInductor's model library then exports
# a second libstdc++. Its streams mix with those that torch has loaded: std::bad_cast or a segmentation fault when a
# package is loaded, whatever the model is.
#
# usage: CXX=scripts/cxx_local_archives.sh python ...
#   MOEQ_CXX   the compiler itself     (default: g++)
case " $* " in
  *" -shared "*) exec "${MOEQ_CXX:-g++}" "$@" -Wl,--exclude-libs,ALL ;;
esac
exec "${MOEQ_CXX:-g++}" "$@"
