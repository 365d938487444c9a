# The commands people use here; `just` lists them.

default:
    @just --list

# The demo of the README.
demo *args:
    cargo run --release -- demo {{args}}

# A cluster on this machine.
up *args:
    cargo run --release -- up {{args}}

# The README's test command.
test:
    cargo test --workspace

# Every fuzz target for so many seconds.
fuzz seconds *targets:
    fuzz/run {{seconds}} {{targets}}

# What CI runs.
ci:
    .ci/run

# The checks that take hours.
nightly *args:
    scripts/nightly {{args}}

fmt:
    cargo fmt --all

lint:
    cargo clippy --workspace --all-targets -- -D warnings

# Licences, advisories, sources (needs cargo-deny).
deny:
    cargo deny check

# Millrace against its peers; see benches/README.md.
bench-peers *args:
    benches/peers/compare.py {{args}}
