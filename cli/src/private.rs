//! Keeps a server's files from other users of the machine: they hold models, state and logs of every
//! tenant. New files get their modes from the process's umask, sled's files among them. What an earlier
//! version made for everybody to read is tightened at the start, without a word to be typed: whoever
//! upgrades wants the same, and a directory that is refused would keep a cluster down.

use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::Mode;

use crate::failure::Failure;

/// What a group or others may do.
const OTHERS: u32 = 0o077;

/// What controllers and workers make in their data directories, and file systems in their roots.
const OWN: &[&str] = &[
    "artifacts",
    "identity",
    "identity.json",
    "identity.json.tmp",
    "identity.tmp",
    "learned.json",
    "learned.json.tmp",
    "lock",
    "log",
    "log.witness",
    "lost+found",
    "programs",
    "snapshots",
];

/// Makes every file that this process and its children make from now on its user's alone.
pub(crate) fn keep_new_files_private() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Takes a data directory from everybody but its user. Only what a server made is changed: a directory
/// that was mistyped holds other things.
pub(crate) fn tighten(data_dir: &Path) -> Result<(), Failure> {
    tighten_own(data_dir).map_err(|error| {
        let dir = data_dir.display();
        Failure::failed(format!("others can read {dir}, and that cannot be changed: {error}"))
            .hint(format!("make it this user's alone: chown -R \"$USER\" {dir} && chmod -R go= {dir}"))
    })
}

fn tighten_own(data_dir: &Path) -> io::Result<()> {
    let names = match fs::read_dir(data_dir) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut alone = true;
    for entry in names {
        let entry = entry?;
        let own = entry.file_name().to_str().is_some_and(|name| OWN.contains(&name));
        alone &= own;
        if own && entry.file_name() != "lost+found" {
            tighten_tree(&entry.path())?;
        }
    }
    if alone {
        return tighten_one(data_dir, &fs::metadata(data_dir)?);
    }
    if fs::metadata(data_dir)?.mode() & OTHERS != 0 {
        tracing::warn!(
            path = %data_dir.display(),
            "the data directory holds files that no server made, and others can look into it: chmod 700 it"
        );
    }
    Ok(())
}

fn tighten_tree(path: &Path) -> io::Result<()> {
    // What a link points to is not ours to change.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => return Ok(()),
        Ok(metadata) => metadata,
        // Another process of the same directory may still be at work in it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    tighten_one(path, &metadata)?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            tighten_tree(&entry?.path())?;
        }
    }
    Ok(())
}

fn tighten_one(path: &Path, metadata: &Metadata) -> io::Result<()> {
    let mode = metadata.mode();
    if mode & OTHERS == 0 {
        return Ok(());
    }
    match fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS & 0o7777)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    fn make(dir: &Path, name: &str) {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"x").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        fs::set_permissions(path.parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn a_servers_own_files_are_taken_from_others_and_no_other_file_is() {
        let dir = tempfile::tempdir().unwrap();
        let (data, other) = (dir.path().join("data"), dir.path().join("home"));
        for name in ["log/db", "artifacts/incoming/a", "identity"] {
            make(&data, name);
            make(&other, name);
        }
        make(&other, "thesis.tex");
        std::os::unix::fs::symlink(other.join("thesis.tex"), data.join("log/link")).unwrap();
        tighten(&data).unwrap();
        tighten(&other).unwrap();
        for dir in [&data, &other] {
            assert_eq!(mode(&dir.join("log")), 0o700);
            assert_eq!(mode(&dir.join("log/db")), 0o600);
            assert_eq!(mode(&dir.join("artifacts/incoming/a")), 0o600);
            assert_eq!(mode(&dir.join("identity")), 0o600);
        }
        assert_eq!(mode(&data), 0o700);
        assert_eq!(mode(&other), 0o755, "it holds what no server made");
        assert_eq!(mode(&other.join("thesis.tex")), 0o644);
        tighten(&dir.path().join("none")).unwrap();
    }
}
