//! Writes a file of a network or of an input.

use std::path::Path;

use crate::failure::CommandFailure;
use crate::output::text;

/// Writes a file, and reports its size on stderr.
pub(super) fn write(out: &Path, bytes: &[u8]) -> Result<(), CommandFailure> {
    std::fs::write(out, bytes)
        .map_err(|error| CommandFailure::usage(format!("cannot write {}: {error}", out.display())))?;
    eprintln!("wrote {}, {}", out.display(), text::size(bytes.len() as u64));
    Ok(())
}
