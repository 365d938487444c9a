//! A small disk for one process: a tmpfs over a folder, in a separate mount namespace, so that no
//! other process sees it. A shell holds the namespace. A process enters the namespace at its start, and a
//! restarted process finds the files of its predecessor.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::io::Errno;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// Size of the disk: several times the files of a controller.
const DISK: &str = "size=96m";
/// Maximum time in which the disk is made.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Mounts a disk beside a folder, copies the folder to the disk, mounts the disk over the folder,
/// and runs until its standard input ends.
const HOLD: &str = r#"set -e
mkdir -p "$0.disk"
mount -t tmpfs -o "$1" tmpfs "$0.disk"
cp -a "$0/." "$0.disk/"
mount --bind "$0.disk" "$0"
echo ready
read -r _ || true"#;

/// Returns the reason why this machine does not allow a small disk, which requires the right to
/// mount.
pub(super) fn not_allowed() -> Option<String> {
    let tried = tempfile::tempdir().and_then(|dir| {
        let mut command = std::process::Command::new("unshare");
        command.args([
            "--mount",
            "sh",
            "-c",
            "command -v nsenter && mount -t tmpfs -o size=64k tmpfs \"$0\"",
        ]);
        command.arg(dir.path()).stdin(Stdio::null()).output()
    });
    let why = match tried {
        Ok(output) if output.status.success() => return None,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    Some(format!(
        "a small disk requires unshare, nsenter and the right to mount (run the command as root): {why}"
    ))
}

/// A small disk in place of a folder, which ends when the value is dropped and no process uses the
/// disk.
pub(super) struct SmallDisk {
    pid: u32,
    /// The shell, which ends with its standard input.
    _holder: Child,
    dir: PathBuf,
}

impl SmallDisk {
    /// Replaces a folder that no process uses by a disk with the same files.
    pub(super) async fn in_place_of(dir: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", HOLD]).arg(dir).arg(DISK);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut holder = command.spawn().context("cannot start unshare")?;
        let stdout = holder.stdout.take().context("stdout is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let first = tokio::time::timeout(READY_TIMEOUT, lines.next_line()).await;
        match first.context("the small disk is not mounted in time")?? {
            Some(_ready) => {}
            None => bail!(
                "the small disk in place of {} could not be mounted: see the error above",
                dir.display()
            ),
        }
        // unshare has executed the shell in its own process, so the pid is the shell's.
        let pid = holder.id().context("a process that runs has a pid")?;
        Ok(Self { pid, _holder: holder, dir: dir.to_owned() })
    }

    /// Returns the words in front of a program that is to see this disk.
    pub(super) fn prefix(&self) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--mount=/proc/{}/ns/mnt", self.pid)]
    }

    /// Fills all remaining space. Returns the number of written bytes.
    pub(super) fn fill(&self) -> anyhow::Result<u64> {
        let path = self.filler();
        let mut file = File::options().create(true).append(true).open(&path)?;
        let mut taken = 0;
        // Smaller chunks fill the space in which a larger one no longer fits.
        for chunk in [1 << 20, 4096, 1] {
            let bytes = vec![0xff; chunk];
            loop {
                match file.write(&bytes) {
                    Ok(written @ 1..) => taken += written as u64,
                    Ok(0) => break,
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::NOSPC) => break,
                    Err(error) => {
                        return Err(error).with_context(|| format!("cannot fill {}", path.display()));
                    }
                }
            }
        }
        Ok(taken)
    }

    /// Frees the filled space.
    pub(super) fn free(&self) -> anyhow::Result<()> {
        let path = self.filler();
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// Returns the path of the filler file on this disk, as seen from outside the mount namespace.
    fn filler(&self) -> PathBuf {
        let dir = self.dir.strip_prefix("/").unwrap_or(&self.dir);
        Path::new("/proc").join(self.pid.to_string()).join("root").join(dir).join("filler")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_small_disk_has_the_old_files_and_fills_up_only_inside_its_mount_namespace() {
        if let Some(why) = not_allowed() {
            eprintln!("skipped: {why}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("data");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("old"), "before").unwrap();
        let disk = SmallDisk::in_place_of(&dir).await.unwrap();
        let within = async |script: &str| {
            let prefix = disk.prefix();
            let mut command = Command::new(&prefix[0]);
            command.args(&prefix[1..]).args(["sh", "-c", script]).current_dir("/").env("LC_ALL", "C");
            let output = command.arg(&dir).output().await.unwrap();
            (
                output.status.success(),
                String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
            )
        };
        assert_eq!(within("cat \"$0/old\"").await, (true, "before".to_owned()));
        assert!(disk.fill().unwrap() > 0);
        let (written, said) = within("head -c 100000 /dev/zero > \"$0/new\"").await;
        assert!(!written && said.contains("No space left on device"), "{said}");
        std::fs::write(dir.join("unseen"), vec![1; 100_000]).unwrap();
        disk.free().unwrap();
        assert!(within("head -c 100000 /dev/zero > \"$0/new\"").await.0);
        assert!(!within("cat \"$0/unseen\"").await.0);
    }
}
