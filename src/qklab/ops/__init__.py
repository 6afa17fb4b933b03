"""Operations with more than one implementation: named for their meaning, chosen with `impl=`."""
