//! Damage of disks to stored files: a lost end, a flipped bit, or a part that reads as zeros. The
//! damage is done to the files of a controller that does not run.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rand::Rng as _;
use rand::rngs::StdRng;

/// Maximum number of bytes that are cut off a file's end, as a power of two.
const CUT_BITS: u32 = 17;
/// Numbers of bytes that read as zeros: a disk's sector and its page.
const ZEROED_BYTES: [usize; 2] = [512, 4096];

/// The kind of damage, and the damaged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreDamage {
    CutLog,
    FlipLog,
    ZeroLog,
    CutSnapshot,
    FlipSnapshot,
}

impl StoreDamage {
    pub(super) const ALL: [Self; 5] =
        [Self::CutLog, Self::FlipLog, Self::ZeroLog, Self::CutSnapshot, Self::FlipSnapshot];

    /// Damages a controller's data directory, at a place drawn from the seed. Returns a description
    /// of the damage.
    pub(super) fn inflict(self, data_dir: &Path, rng: &mut StdRng) -> anyhow::Result<String> {
        let path = match self {
            Self::CutLog | Self::FlipLog | Self::ZeroLog => data_dir.join("log").join("db"),
            Self::CutSnapshot | Self::FlipSnapshot => newest_snapshot(data_dir)?,
        };
        let what = match self {
            Self::CutLog | Self::CutSnapshot => cut(&path, rng),
            Self::FlipLog | Self::FlipSnapshot => flip(&path, rng),
            Self::ZeroLog => zero(&path, rng),
        };
        let name = path.strip_prefix(data_dir).unwrap_or(&path).display();
        Ok(format!("{} of {name}", what.with_context(|| format!("cannot damage {}", path.display()))?))
    }
}

fn newest_snapshot(data_dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = data_dir.join("snapshots");
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    // The names sort like the log indexes that the snapshots cover.
    let newest = paths.filter(|path| path.extension().is_some_and(|it| it == "snapshot")).max();
    newest.with_context(|| format!("there is no snapshot in {}", dir.display()))
}

/// Returns the bytes up to the last that is not zero, because files are larger than their contents.
fn used(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = fs::read(path)?;
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(end);
    ensure!(end > 1, "the file is empty");
    Ok(bytes)
}

fn cut(path: &Path, rng: &mut StdRng) -> anyhow::Result<String> {
    let used = used(path)?.len();
    // Draw the magnitude first, so that short cuts are as likely as long ones.
    let most = 1usize << rng.random_range(0..=CUT_BITS);
    let cut = rng.random_range(1..=most).min(used - 1);
    let left = u64::try_from(used - cut)?;
    File::options().write(true).open(path)?.set_len(left)?;
    Ok(format!("cut off the last {cut} of {used} bytes"))
}

fn flip(path: &Path, rng: &mut StdRng) -> anyhow::Result<String> {
    let bytes = used(path)?;
    let at = rng.random_range(0..bytes.len());
    let bit = rng.random_range(0..8);
    File::options().write(true).open(path)?.write_all_at(&[bytes[at] ^ 1 << bit], u64::try_from(at)?)?;
    Ok(format!("flipped bit {bit} of byte {at} of {}", bytes.len()))
}

fn zero(path: &Path, rng: &mut StdRng) -> anyhow::Result<String> {
    let used = used(path)?.len();
    let size = ZEROED_BYTES[rng.random_range(0..ZEROED_BYTES.len())];
    let at = rng.random_range(0..used) / size * size;
    let len = size.min(used - at);
    File::options().write(true).open(path)?.write_all_at(&vec![0; len], u64::try_from(at)?)?;
    Ok(format!("zeroed {len} bytes from byte {at} of {used}"))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    const LEN: usize = 10_000;

    /// Returns a data directory with two snapshots, and with a log of [`LEN`] bytes followed by
    /// zeros.
    fn stored() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in ["log", "snapshots"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("log/db"), [vec![0xff; LEN], vec![0; 50]].concat()).unwrap();
        fs::write(dir.path().join("snapshots/01.snapshot"), [0xff; 3]).unwrap();
        fs::write(dir.path().join("snapshots/02.snapshot"), vec![0xff; LEN]).unwrap();
        fs::write(dir.path().join("snapshots/received-0.tmp"), [0xff; 3]).unwrap();
        dir
    }

    /// Returns the file after this damage, and the description of the damage.
    fn after(damage: StoreDamage, file: &str, seed: u64) -> (Vec<u8>, String) {
        let dir = stored();
        let said = damage.inflict(dir.path(), &mut StdRng::seed_from_u64(seed)).unwrap();
        (fs::read(dir.path().join(file)).unwrap(), said)
    }

    #[test]
    fn each_damage_hits_written_bytes_of_the_log_or_of_the_newest_snapshot() {
        for seed in 0..50 {
            for (damage, file) in
                [(StoreDamage::CutLog, "log/db"), (StoreDamage::CutSnapshot, "snapshots/02.snapshot")]
            {
                let (bytes, said) = after(damage, file, seed);
                assert!((1..LEN).contains(&bytes.len()), "{said}");
                assert!(said.ends_with(file), "{said}");
            }
            for (damage, file) in
                [(StoreDamage::FlipLog, "log/db"), (StoreDamage::FlipSnapshot, "snapshots/02.snapshot")]
            {
                let (bytes, said) = after(damage, file, seed);
                let ones: u32 = bytes.iter().map(|byte| byte.count_ones()).sum();
                assert_eq!(ones as usize, LEN * 8 - 1, "{said}");
            }
            let (bytes, said) = after(StoreDamage::ZeroLog, "log/db", seed);
            let zeros = bytes[..LEN].iter().filter(|&&byte| byte == 0).count();
            assert!((1..=4096).contains(&zeros), "{said}");
        }
    }

    #[test]
    fn the_damage_depends_on_the_seed_alone() {
        for damage in StoreDamage::ALL {
            let file = if damage == StoreDamage::CutSnapshot { "snapshots/02.snapshot" } else { "log/db" };
            assert_eq!(after(damage, file, 7), after(damage, file, 7));
        }
    }

    #[test]
    fn damaging_a_missing_snapshot_is_an_error() {
        let dir = stored();
        fs::remove_dir_all(dir.path().join("snapshots")).unwrap();
        fs::create_dir(dir.path().join("snapshots")).unwrap();
        let error = StoreDamage::CutSnapshot.inflict(dir.path(), &mut StdRng::seed_from_u64(1)).unwrap_err();
        assert!(error.to_string().contains("no snapshot"), "{error}");
    }
}
