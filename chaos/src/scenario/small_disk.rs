//! A small disk for one process: a tmpfs, mounted over a folder in mounts of its own, so that nobody
//! else sees it. A shell holds those mounts; a process enters them as it starts, and one that is
//! started again finds what the one before it left.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::io::Errno;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// What such a disk holds: several times the files of a controller.
const DISK: &str = "size=96m";
/// How long making one may take.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Mounts a disk beside a folder, copies the folder to it, puts it in the folder's place, and stays
/// until its standard input ends.
const HOLD: &str = r#"set -e
mkdir -p "$0.disk"
mount -t tmpfs -o "$1" tmpfs "$0.disk"
cp -a "$0/." "$0.disk/"
mount --bind "$0.disk" "$0"
echo ready
read -r _ || true"#;

/// Why this machine does not let us have one, if so: it takes the right to mount.
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
    Some(format!("a small disk takes unshare and nsenter, and the right to mount (run it as root): {why}"))
}

/// A small disk in place of a folder. It is gone when this is dropped and nobody uses it any more.
pub(super) struct SmallDisk {
    pid: u32,
    /// Ends with its standard input, which is ours.
    _holder: Child,
    dir: PathBuf,
}

impl SmallDisk {
    /// Puts one in the place of a folder that nobody uses now, with what is in it.
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
            None => bail!("the small disk in place of {} could not be mounted: see above", dir.display()),
        }
        // unshare has become the shell.
        let pid = holder.id().context("a process that runs has a pid")?;
        Ok(Self { pid, _holder: holder, dir: dir.to_owned() })
    }

    /// What makes a program see this disk, in front of its words.
    pub(super) fn prefix(&self) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--mount=/proc/{}/ns/mnt", self.pid)]
    }

    /// Takes all the space that is left. Returns the bytes it took.
    pub(super) fn fill(&self) -> anyhow::Result<u64> {
        let path = self.filler();
        let mut file = File::options().create(true).append(true).open(&path)?;
        let mut taken = 0;
        // What does not fit as a whole fits in part.
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

    /// Gives the space back.
    pub(super) fn free(&self) -> anyhow::Result<()> {
        let path = self.filler();
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// A file on this disk, as one without its mounts reaches it.
    fn filler(&self) -> PathBuf {
        let dir = self.dir.strip_prefix("/").unwrap_or(&self.dir);
        Path::new("/proc").join(self.pid.to_string()).join("root").join(dir).join("filler")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_small_disk_has_what_was_there_and_is_full_only_for_those_who_see_it() {
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
