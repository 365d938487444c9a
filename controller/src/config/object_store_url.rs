//! The URL of the object store that the controllers share, as an operator writes it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use object_store::path::Path;
use url::Url;

/// The shared store of model files for all controllers of a group: `file:///shared/folder` or
/// `s3://bucket/prefix`. The URL never has credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStoreUrl {
    url: String,
    pub(crate) kind: ObjectStoreKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ObjectStoreKind {
    /// A folder that all controllers can reach, on a shared volume.
    Folder(PathBuf),
    Bucket {
        name: String,
        prefix: Path,
    },
}

/// Error of a text that is not such a URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}: write file:///shared/folder or s3://bucket/prefix")]
pub struct SharedPlaceError {
    problem: String,
}

fn problem<T>(problem: impl Into<String>) -> Result<T, SharedPlaceError> {
    Err(SharedPlaceError { problem: problem.into() })
}

impl FromStr for ObjectStoreUrl {
    type Err = SharedPlaceError;

    fn from_str(text: &str) -> Result<Self, SharedPlaceError> {
        let url = Url::parse(text).or_else(|error| problem(format!("not a URL ({error})")))?;
        if !url.username().is_empty() || url.password().is_some() {
            return problem(
                "credentials belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not in a URL",
            );
        }
        if url.query().is_some() || url.fragment().is_some() {
            return problem("the URL of an object store has no ? or #");
        }
        let kind = match url.scheme() {
            "file" => folder(&url)?,
            "s3" => bucket(&url)?,
            other => return problem(format!("{other}: is not a known scheme")),
        };
        // Trailing slashes do not make another place.
        Ok(Self { url: url.as_str().trim_end_matches('/').to_owned(), kind })
    }
}

fn folder(url: &Url) -> Result<ObjectStoreKind, SharedPlaceError> {
    if let Some(host) = url.host_str().filter(|host| !host.is_empty()) {
        return problem(format!("{host} would be a host name: a folder's URL has three slashes"));
    }
    match url.to_file_path() {
        Ok(path) if path.parent().is_some() => Ok(ObjectStoreKind::Folder(path)),
        Ok(_) => problem("the root folder cannot hold model files"),
        Err(()) => problem("the URL is not the path of a folder"),
    }
}

fn bucket(url: &Url) -> Result<ObjectStoreKind, SharedPlaceError> {
    let Some(name) = url.host_str().filter(|name| !name.is_empty()) else {
        return problem("the URL names no bucket");
    };
    if url.port().is_some() {
        return problem("a bucket has no port; set its endpoint with AWS_ENDPOINT");
    }
    let prefix = Path::from_url_path(url.path()).or_else(|error| problem(error.to_string()))?;
    Ok(ObjectStoreKind::Bucket { name: name.to_owned(), prefix })
}

impl fmt::Display for ObjectStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_a_folder_and_of_a_bucket_are_parsed() {
        let check = |text: &str, shown: &str, kind: ObjectStoreKind| {
            let place: ObjectStoreUrl = text.parse().unwrap();
            assert_eq!((place.to_string().as_str(), place.kind), (shown, kind));
        };
        check("file:///mnt/models/", "file:///mnt/models", ObjectStoreKind::Folder("/mnt/models".into()));
        let bucket =
            |prefix: &str| ObjectStoreKind::Bucket { name: "models".into(), prefix: Path::from(prefix) };
        check("s3://models", "s3://models", bucket(""));
        check("s3://models/team/a/", "s3://models/team/a", bucket("team/a"));
    }

    #[test]
    fn other_urls_are_refused_with_the_reason() {
        let check = |text: &str, expected: &str| {
            let refused = text.parse::<ObjectStoreUrl>().unwrap_err().to_string();
            assert!(
                refused.contains(expected) && refused.contains("s3://bucket/prefix"),
                "{text}: {refused}"
            );
        };
        check("/mnt/models", "not a URL");
        check("file://mnt/models", "three slashes");
        check("file:///", "root folder");
        check("gs://models", "gs: is not a known scheme");
        check("s3:///models", "names no bucket");
        check("s3://models:9000", "AWS_ENDPOINT");
        check("s3://models?region=x", "no ? or #");
        check("s3://key:secret@models", "AWS_SECRET_ACCESS_KEY");
        let refused = "s3://key:secret@models".parse::<ObjectStoreUrl>().unwrap_err().to_string();
        assert!(!refused.contains("key:secret"), "{refused}");
    }
}
