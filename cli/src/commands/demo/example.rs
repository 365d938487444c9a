//! The example classifier, embedded in the binary so that the demo runs anywhere.

use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::failure::CommandFailure;

/// The function's name in the manifest.
pub(super) const NAME: &str = "digits";

const MANIFEST: &str = include_str!("../../../../examples/digits/function.yaml");
const MODEL: &[u8] = include_bytes!("../../../../examples/digits/digits.onnx");

macro_rules! images {
    ($($file:literal),*) => {
        [$(($file, include_bytes!(concat!("../../../../examples/digits/images/", $file)).as_slice())),*]
    };
}

const IMAGES: [(&str, &[u8]); 10] = images![
    "digit-0.png",
    "digit-1.png",
    "digit-2.png",
    "digit-3.png",
    "digit-4.png",
    "digit-5.png",
    "digit-6.png",
    "digit-7.png",
    "digit-8.png",
    "digit-9.png"
];

/// A test image.
#[derive(Debug, Clone)]
pub(super) struct TestImage {
    pub(super) name: &'static str,
    /// The digit in the image.
    pub(super) digit: char,
    pub(super) png: Bytes,
}

/// Returns the test images: one of each digit, none from the training set.
pub(super) fn pictures() -> Result<Vec<TestImage>, CommandFailure> {
    let picture = |(name, png): (&'static str, &'static [u8])| {
        let digit = name.chars().find(char::is_ascii_digit);
        let digit =
            digit.ok_or_else(|| CommandFailure::failed(format!("the file name {name} has no digit")))?;
        Ok(TestImage { name, digit, png: Bytes::from_static(png) })
    };
    IMAGES.into_iter().map(picture).collect()
}

/// Writes the manifest and the model into a folder. Returns the manifest's path.
pub(super) fn unpack(folder: &Path) -> Result<PathBuf, CommandFailure> {
    let manifest = folder.join("function.yaml");
    for (path, bytes) in [(folder.join("digits.onnx"), MODEL), (manifest.clone(), MANIFEST.as_bytes())] {
        std::fs::write(&path, bytes)
            .map_err(|error| CommandFailure::failed(format!("cannot write {}: {error}", path.display())))?;
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::manifest::{Manifest, ModelSource};

    #[test]
    fn the_test_images_have_one_of_each_digit() {
        let digits: String = pictures().unwrap().iter().map(|picture| picture.digit).collect();
        assert_eq!(digits, "0123456789");
    }

    #[test]
    fn the_manifest_names_the_unpacked_model() {
        let manifests = millrace_types::manifest::parse(MANIFEST).unwrap();
        let functions: Vec<_> = manifests.into_iter().filter_map(Manifest::function).collect();
        let [function] = &functions[..] else { panic!("{functions:?}") };
        let model = ModelSource::File { path: "digits.onnx".into(), declared: None };
        assert_eq!((function.spec.key.name.as_str(), &function.model), (NAME, &model));
    }
}
