//! The files of a server are private to its user, whatever the umask.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::Signal;

use crate::running::RunningCluster;

/// Calls `visit` with every file and folder below a folder.
fn walk(dir: &Path, visit: &mut impl FnMut(&Path, bool, u32)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        // A temporary file may have been deleted meanwhile.
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        visit(&path, metadata.is_dir(), metadata.mode() & 0o777);
        if metadata.is_dir() {
            walk(&path, visit);
        }
    }
}

fn assert_private(dir: &Path) {
    let mut files = 0;
    walk(dir, &mut |path, is_dir, mode| {
        files += usize::from(!is_dir);
        // A program's file is executable by its user.
        let expected: &[u32] = if is_dir { &[0o700] } else { &[0o600, 0o700] };
        assert!(expected.contains(&mode), "{} has mode {mode:o}", path.display());
    });
    assert!(files > 8, "{files} files under {}", dir.display());
}

#[test]
fn all_files_of_a_cluster_and_of_an_earlier_version_are_private() {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("data");
    let up = RunningCluster::in_dir(&dir);
    up.apply_digits();
    assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
    assert_private(&dir);
    up.signal(Signal::TERM);
    assert!(up.ended().0.success());

    walk(&dir, &mut |path, is_dir, _| {
        fs::set_permissions(path, Permissions::from_mode(if is_dir { 0o755 } else { 0o644 })).unwrap();
    });
    let up = RunningCluster::in_dir(&dir);
    for part in fs::read_dir(&dir).unwrap() {
        let part = part.unwrap().path();
        if part.is_dir() {
            walk(&part, &mut |path, _, mode| assert_eq!(mode & 0o077, 0, "{} {mode:o}", path.display()));
        }
    }
    up.signal(Signal::TERM);
    assert!(up.ended().0.success());
}
