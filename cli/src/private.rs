//! Keeps a server's files from other users of the machine, because they hold models, state and logs
//! of every tenant. New files, sled's included, get their modes from the process's umask. Files
//! that an earlier version made readable to all are tightened at the start. The upgrade needs no
//! action by the operator: refusing the directory would keep the cluster down.

use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::Mode;

use crate::failure::CommandFailure;

/// The permission bits of the group and of others.
const OTHERS: u32 = 0o077;

/// The names that controllers and workers create in their data directories, and that file systems
/// create in their roots.
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

/// Makes all new files of this process and its children private to the user.
pub(crate) fn keep_new_files_private() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Makes a data directory private to its user. Only files that a server made are changed, because a
/// mistyped directory holds other files.
pub(crate) fn tighten(data_dir: &Path) -> Result<(), CommandFailure> {
    tighten_own(data_dir).map_err(|error| {
        let dir = data_dir.display();
        CommandFailure::failed(format!("other users can read {dir}, and its mode cannot be changed: {error}"))
            .hint(format!("make it private to this user: chown -R \"$USER\" {dir} && chmod -R go= {dir}"))
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
            "other users can read the data directory, and it holds files that no server made: run chmod 700 on it"
        );
    }
    Ok(())
}

fn tighten_tree(path: &Path) -> io::Result<()> {
    // The target of a symbolic link may lie outside the data directory.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => return Ok(()),
        Ok(metadata) => metadata,
        // Another process with the same directory may delete files meanwhile.
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
    fn only_the_servers_own_files_are_made_private() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let other = dir.path().join("home");
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
        assert_eq!(mode(&other), 0o755, "the folder holds a file that no server made");
        assert_eq!(mode(&other.join("thesis.tex")), 0o644);
        tighten(&dir.path().join("none")).unwrap();
    }
}
