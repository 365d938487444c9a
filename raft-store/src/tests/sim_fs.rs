//! A file system in memory with simulated power cuts.
//!
//! The file system has two layers: the data that a running process sees, and the durable data. A
//! file's contents become durable when the file is synced, a directory's names when the directory
//! is synced. At a power cut, unsynced data is lost, kept or torn according to [`Loss`], because a
//! disk may have written any of it already.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::fs::{Fs, FsFile};

/// The fate of unsynced data at a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// All unsynced data is lost.
    All,
    /// All unsynced data is kept.
    None,
    /// Names are kept. Unsynced contents keep their length and first half; the rest is zeros.
    Torn,
    /// Contents are kept, and names are lost.
    Names,
}

impl Loss {
    pub(super) const ALL: [Self; 4] = [Self::All, Self::None, Self::Torn, Self::Names];
}

type Inode = usize;

#[derive(Debug, Default)]
struct Layers {
    seen: BTreeMap<PathBuf, Inode>,
    durable: BTreeMap<PathBuf, Inode>,
    contents: Vec<Vec<u8>>,
    durable_contents: Vec<Vec<u8>>,
    /// The number of operations that may still succeed; `None` for no limit.
    left: Option<usize>,
    done: usize,
}

impl Layers {
    /// Counts an operation that changes data. Fails once the power is off.
    fn operate(&mut self) -> io::Result<()> {
        match &mut self.left {
            Some(0) => return Err(io::Error::other("the power is off")),
            Some(left) => *left -= 1,
            None => {}
        }
        self.done += 1;
        Ok(())
    }
}

/// The file system. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct SimFs(Arc<Mutex<Layers>>);

impl SimFs {
    /// Lets `operations` more operations succeed. Every later operation fails.
    pub(super) fn cut_after(&self, operations: usize) {
        self.0.lock().unwrap().left = Some(operations);
    }

    /// Returns the number of changes so far.
    pub(super) fn operations(&self) -> usize {
        self.0.lock().unwrap().done
    }

    /// Returns the file system after a power cut.
    pub(super) fn after_power_cut(&self, loss: Loss) -> Self {
        let layers = self.0.lock().unwrap();
        let names = if matches!(loss, Loss::All | Loss::Names) { &layers.durable } else { &layers.seen };
        let contents = |inode: Inode| match loss {
            Loss::All => layers.durable_contents[inode].clone(),
            Loss::None | Loss::Names => layers.contents[inode].clone(),
            Loss::Torn if layers.contents[inode] == layers.durable_contents[inode] => {
                layers.contents[inode].clone()
            }
            Loss::Torn => {
                let mut torn = layers.contents[inode].clone();
                let half = torn.len() / 2;
                torn[half..].fill(0);
                torn
            }
        };
        let survived = Self::default();
        {
            let mut after = survived.0.lock().unwrap();
            for (inode, (path, &of)) in names.iter().enumerate() {
                after.seen.insert(path.clone(), inode);
                after.contents.push(contents(of));
            }
            after.durable = after.seen.clone();
            after.durable_contents = after.contents.clone();
        }
        survived
    }

    /// Returns the names and contents of all files, as a running process sees them.
    pub(super) fn tree(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let layers = self.0.lock().unwrap();
        layers.seen.iter().map(|(path, &inode)| (path.clone(), layers.contents[inode].clone())).collect()
    }
}

impl Fs for SimFs {
    /// Directories always exist; a power cut affects only their contents.
    fn create_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let mut layers = self.0.lock().unwrap();
        layers.operate()?;
        // Truncating a file in place would be an operation of its own, which the store never does.
        assert!(!layers.seen.contains_key(path), "{} is overwritten in place", path.display());
        let inode = layers.contents.len();
        layers.contents.push(Vec::new());
        layers.durable_contents.push(Vec::new());
        layers.seen.insert(path.to_owned(), inode);
        Ok(Box::new(SimFile { fs: self.clone(), inode }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let layers = self.0.lock().unwrap();
        let inode = *layers.seen.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(SimFile { fs: self.clone(), inode }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let layers = self.0.lock().unwrap();
        let inside = layers.seen.keys().filter(|path| path.parent() == Some(dir));
        Ok(inside.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut layers = self.0.lock().unwrap();
        layers.operate()?;
        let inode = layers.seen.remove(from).ok_or(io::ErrorKind::NotFound)?;
        layers.seen.insert(to.to_owned(), inode);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut layers = self.0.lock().unwrap();
        layers.operate()?;
        layers.seen.remove(path).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut layers = self.0.lock().unwrap();
        layers.operate()?;
        let inside = |path: &Path| path.parent() == Some(dir);
        layers.durable.retain(|path, _| !inside(path));
        let seen: Vec<_> =
            layers.seen.iter().filter(|(path, _)| inside(path)).map(|(p, i)| (p.clone(), *i)).collect();
        layers.durable.extend(seen);
        Ok(())
    }
}

struct SimFile {
    fs: SimFs,
    inode: Inode,
}

impl FsFile for SimFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut layers = self.fs.0.lock().unwrap();
        layers.operate()?;
        layers.contents[self.inode].extend(bytes);
        Ok(())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let layers = self.fs.0.lock().unwrap();
        let contents = &layers.contents[self.inode];
        let rest = contents.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.fs.0.lock().unwrap().contents[self.inode].len() as u64)
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut layers = self.fs.0.lock().unwrap();
        layers.operate()?;
        layers.durable_contents[self.inode] = layers.contents[self.inode].clone();
        Ok(())
    }
}

#[test]
fn only_synced_data_survives_a_total_loss() {
    let fs = SimFs::default();
    let dir = Path::new("/d");
    let synced = Path::new("/d/synced");
    let unsynced = Path::new("/d/unsynced");
    let mut file = fs.create(synced).unwrap();
    file.append(b"kept").unwrap();
    file.sync().unwrap();
    fs.sync_dir(dir).unwrap();
    file.append(b" lost").unwrap();
    fs.create(unsynced).unwrap().append(b"lost").unwrap();
    let survived = |loss| fs.after_power_cut(loss).tree().into_values().collect::<Vec<_>>();
    assert_eq!(survived(Loss::All), [b"kept".to_vec()]);
    assert_eq!(survived(Loss::None), [b"kept lost".to_vec(), b"lost".to_vec()]);
    assert_eq!(survived(Loss::Torn), [b"kept\0\0\0\0\0".to_vec(), b"lo\0\0".to_vec()]);
    assert_eq!(survived(Loss::Names), [b"kept lost".to_vec()]);
}
