//! Grid files: numpy's `.npy` and HDF5.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hdf5_metno as hdf5;
use millstream_fragment::file::sync_name;
use ndarray::{Array2, s};
use ndarray_npy::WritableElement;
use ndarray_npy::npy::header::{Header, Layout, ParseHeaderError, ReadHeaderError};

use crate::grid::{Grid, Shape};

/// Default dataset of an HDF5 file.
const DATASET: &str = "grid";

/// Approximate size of the chunks in which HDF5 rows are read and written (bytes).
const CHUNK_BYTES: u64 = 16 << 20;

/// The name of a grid file: `NAME.npy`, `NAME.h5` or `NAME.hdf5`; the latter two take `:DATASET` after the name (default:
/// `grid`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridFile {
    path: PathBuf,
    format: Format,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Format {
    Npy,
    Hdf5 { dataset: String },
}

/// A grid file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    path: PathBuf,
    problem: FileProblem,
}

#[derive(Debug, thiserror::Error)]
enum FileProblem {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Hdf5(#[from] hdf5::Error),
    #[error("not a .npy file: {0}")]
    NotNpy(ParseHeaderError),
    #[error("not a .npy file: its header is incomplete or longer than 64 KiB")]
    NpyHeaderLength,
    #[error("header of the .npy file, field {field}: {found}, expected {expected}")]
    Header { field: &'static str, found: String, expected: &'static str },
    #[error("dataset {dataset}, {field}: {found}, expected {expected}")]
    Dataset { dataset: String, field: &'static str, found: String, expected: &'static str },
    #[error("has {has} bytes of data, its header says {says}")]
    Length { has: u64, says: u64 },
}

/// The name of a grid file is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}: expected a name that ends with .npy, .h5, .hdf5, .h5:DATASET or .hdf5:DATASET")]
pub struct InvalidGridFileName(String);

impl FromStr for GridFile {
    type Err = InvalidGridFileName;

    fn from_str(text: &str) -> Result<GridFile, InvalidGridFileName> {
        let extension = |path: &str| {
            Path::new(path).extension().and_then(|ending| ending.to_str()).map(str::to_ascii_lowercase)
        };
        let is_hdf5 = |path: &str| matches!(extension(path).as_deref(), Some("h5" | "hdf5"));
        if extension(text).as_deref() == Some("npy") {
            return Ok(GridFile { path: text.into(), format: Format::Npy });
        }
        let (path, dataset) = match text.rsplit_once(':') {
            Some((path, dataset)) if is_hdf5(path) && !dataset.is_empty() => (path, dataset),
            _ if is_hdf5(text) => (text, DATASET),
            _ => return Err(InvalidGridFileName(text.to_owned())),
        };
        Ok(GridFile { path: path.into(), format: Format::Hdf5 { dataset: dataset.to_owned() } })
    }
}

impl GridFile {
    /// Reads the shape of the grid.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn shape(&self) -> Result<Shape, FileError> {
        self.named(match &self.format {
            Format::Npy => npy_open(&self.path).map(|(shape, _)| shape),
            Format::Hdf5 { dataset } => hdf5_open(&self.path, dataset).map(|(shape, _)| shape),
        })
    }

    /// Reads the grid, which must have the shape of the file.
    ///
    /// # Errors
    /// [`FileError`].
    ///
    /// # Panics
    /// If the grid's shape differs from the file's.
    pub fn read(&self, grid: &mut Grid) -> Result<(), FileError> {
        self.named(match &self.format {
            Format::Npy => npy_read(&self.path, grid),
            Format::Hdf5 { dataset } => hdf5_read(&self.path, dataset, grid),
        })
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the grid; the file is the old one or the whole new one, also after a crash of the host. Other datasets of an
    /// HDF5 file stay.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn write(&self, grid: &Grid) -> Result<(), FileError> {
        let mut partial = self.path.clone().into_os_string();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let written = match &self.format {
            Format::Npy => npy_write(&partial, grid),
            Format::Hdf5 { dataset } => hdf5_update(&self.path, &partial, dataset, grid),
        };
        let moved = written.and_then(|()| {
            File::open(&partial)?.sync_all()?;
            std::fs::rename(&partial, &self.path)?;
            Ok(sync_name(&self.path).map_err(|error| error.cause)?)
        });
        if moved.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        self.named(moved)
    }

    fn named<T>(&self, outcome: Result<T, FileProblem>) -> Result<T, FileError> {
        outcome.map_err(|problem| FileError { path: self.path.clone(), problem })
    }
}

/// The longest accepted header of a `.npy` file (bytes).
const NPY_HEADER_BYTES: u64 = 64 << 10;

/// Reads the header (numpy.lib.format, versions 1 to 3). Returns the shape, and the file positioned at the first element.
///
/// The elements are read into the grid's memory and written from it. `ndarray-npy`'s reader of whole arrays would allocate
/// another array, and accepts Fortran order.
fn npy_open(path: &Path) -> Result<(Shape, BufReader<File>), FileProblem> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut file = BufReader::new(file);
    // `ndarray-npy` reserves the length that the header states, up to 4 GiB, before it reads.
    if npy_header_bytes(file.fill_buf()?).is_some_and(|bytes| bytes > NPY_HEADER_BYTES) {
        return Err(FileProblem::NpyHeaderLength);
    }
    let header =
        Header::from_reader(&mut file.by_ref().take(NPY_HEADER_BYTES)).map_err(|error| match error {
            ReadHeaderError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                FileProblem::NpyHeaderLength
            }
            ReadHeaderError::Io(error) => error.into(),
            ReadHeaderError::Parse(error) => FileProblem::NotNpy(error),
        })?;
    let shape = npy_shape(&header)?;
    let (has, says) = (size - file.stream_position()?, shape.bytes());
    if has != says {
        return Err(FileProblem::Length { has, says });
    }
    Ok((shape, file))
}

/// The length of the whole header as its first bytes state it; `None` if they are incomplete or of an unknown version,
/// which the parser refuses. Version 1 has a 16-bit length, versions 2 and 3 have 32 bits.
fn npy_header_bytes(start: &[u8]) -> Option<u64> {
    let prefix: &[u8; 12] = start.first_chunk()?;
    match prefix[6] {
        1 => Some(10 + u64::from(u16::from_le_bytes([prefix[8], prefix[9]]))),
        2 | 3 => Some(12 + u64::from(u32::from_le_bytes([prefix[8], prefix[9], prefix[10], prefix[11]]))),
        _ => None,
    }
}

fn npy_shape(header: &Header) -> Result<Shape, FileProblem> {
    let wrong = |field, found: String, expected| FileProblem::Header { field, found, expected };
    let descr = &header.type_descriptor;
    let double = match (*descr == f32::type_descriptor(), *descr == f64::type_descriptor()) {
        (true, _) => false,
        (_, true) => true,
        _ => return Err(wrong("descr", descr.to_string(), "'<f4' or '<f8'")),
    };
    if header.layout.is_fortran() {
        return Err(wrong("fortran_order", "True".to_owned(), "False"));
    }
    let shape = match header.shape[..] {
        [rows, columns] => checked(Shape { rows: rows as u64, columns: columns as u64, double }),
        _ => None,
    };
    let expected = "two numbers, neither zero, of a grid that memory can hold";
    shape.ok_or_else(|| wrong("shape", format!("{:?}", header.shape), expected))
}

/// The shape, if its size is valid.
fn checked(shape: Shape) -> Option<Shape> {
    let bytes = shape.rows.checked_mul(shape.columns)?.checked_mul(shape.element_bytes())?;
    (bytes > 0 && bytes <= isize::MAX as u64).then_some(shape)
}

fn npy_read(path: &Path, grid: &mut Grid) -> Result<(), FileProblem> {
    let (shape, mut file) = npy_open(path)?;
    assert_eq!(shape, grid.shape());
    Ok(file.read_exact(grid.bytes_mut())?)
}

fn npy_write(path: &Path, grid: &Grid) -> Result<(), FileProblem> {
    let Shape { rows, columns, double } = grid.shape();
    let header = Header {
        type_descriptor: if double { f64::type_descriptor() } else { f32::type_descriptor() },
        layout: Layout::Standard,
        shape: vec![rows as usize, columns as usize],
    };
    let mut file = File::create(path)?;
    file.write_all(&header.to_bytes().expect("a type and two numbers are a short ASCII text"))?;
    Ok(file.write_all(grid.bytes())?)
}

fn hdf5_open(path: &Path, name: &str) -> Result<(Shape, hdf5::Dataset), FileProblem> {
    // The library's message for a missing file is long and unclear.
    File::open(path)?;
    let dataset = hdf5::File::open(path)?.dataset(name)?;
    let wrong = |field, found: String, expected| FileProblem::Dataset {
        dataset: name.to_owned(),
        field,
        found,
        expected,
    };
    let element = dataset.dtype()?;
    let double = match (element.is::<f32>(), element.is::<f64>()) {
        (true, _) => false,
        (_, true) => true,
        _ => return Err(wrong("type", format!("{:?}", element.to_descriptor()?), "float32 or float64")),
    };
    let shape = dataset.shape();
    let refused = || wrong("shape", format!("{shape:?}"), "two numbers, neither zero");
    match shape[..] {
        [rows, columns] => {
            let shape = checked(Shape { rows: rows as u64, columns: columns as u64, double });
            Ok((shape.ok_or_else(refused)?, dataset))
        }
        _ => Err(refused()),
    }
}

/// Ranges of rows of about a chunk each.
fn row_chunks(shape: Shape) -> impl Iterator<Item = (usize, usize)> {
    let step = (CHUNK_BYTES / shape.row_bytes()).max(1);
    (0..shape.rows)
        .step_by(step as usize)
        .map(move |row| (row as usize, (row + step).min(shape.rows) as usize))
}

fn hdf5_read(path: &Path, name: &str, grid: &mut Grid) -> Result<(), FileProblem> {
    let (shape, dataset) = hdf5_open(path, name)?;
    assert_eq!(shape, grid.shape());
    for (first, end) in row_chunks(shape) {
        let bytes = grid.span(&(first as u64..end as u64));
        let to = &mut grid.bytes_mut()[bytes.start as usize..bytes.end as usize];
        if shape.double {
            let rows: Array2<f64> = dataset.read_slice_2d(s![first..end, ..])?;
            to.as_chunks_mut().0.iter_mut().zip(&rows).for_each(|(to, cell)| *to = cell.to_le_bytes());
        } else {
            let rows: Array2<f32> = dataset.read_slice_2d(s![first..end, ..])?;
            to.as_chunks_mut().0.iter_mut().zip(&rows).for_each(|(to, cell)| *to = cell.to_le_bytes());
        }
    }
    Ok(())
}

/// Writes the contents of `path` to `partial`, with the dataset in place of an older one of its name.
fn hdf5_update(path: &Path, partial: &Path, name: &str, grid: &Grid) -> Result<(), FileProblem> {
    let has_contents = std::fs::metadata(path).is_ok_and(|file| file.len() > 0);
    let file = if has_contents {
        std::fs::copy(path, partial)?;
        hdf5::File::open_rw(partial)?
    } else {
        hdf5::File::create(partial)?
    };
    if file.link_exists(name) {
        // A group of this name stays: it is no dataset.
        file.dataset(name)?;
        file.unlink(name)?;
    }
    hdf5_write(file, name, grid)
}

fn hdf5_write(file: hdf5::File, name: &str, grid: &Grid) -> Result<(), FileProblem> {
    let shape = grid.shape();
    let (rows, columns) = (shape.rows as usize, shape.columns as usize);
    let dataset = match shape.double {
        true => file.new_dataset::<f64>().shape((rows, columns)).create(name)?,
        false => file.new_dataset::<f32>().shape((rows, columns)).create(name)?,
    };
    for (first, end) in row_chunks(shape) {
        let bytes = grid.span(&(first as u64..end as u64));
        let from = &grid.bytes()[bytes.start as usize..bytes.end as usize];
        let dimensions = (end - first, columns);
        let fits = "as many cells as rows times columns";
        if shape.double {
            let cells = from.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect();
            let rows = Array2::from_shape_vec(dimensions, cells).expect(fits);
            dataset.write_slice(&rows, s![first..end, ..])?;
        } else {
            let cells = from.as_chunks().0.iter().map(|cell| f32::from_le_bytes(*cell)).collect();
            let rows = Array2::from_shape_vec(dimensions, cells).expect(fits);
            dataset.write_slice(&rows, s![first..end, ..])?;
        }
    }
    file.close()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(double: bool) -> Grid {
        let mut grid = Grid::zeros(Shape { rows: 37, columns: 19, double }, None).unwrap();
        grid.generate(5);
        grid
    }

    #[test]
    fn grids_survive_both_file_formats() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.npy", "b.h5", "c.hdf5:run7"] {
            for double in [false, true] {
                let file: GridFile = format!("{}/{name}", folder.path().display()).parse().unwrap();
                let grid = grid(double);
                file.write(&grid).unwrap();
                assert_eq!(file.shape().unwrap(), grid.shape());
                let mut back = Grid::zeros(grid.shape(), None).unwrap();
                file.read(&mut back).unwrap();
                back.compare(grid.bytes()).unwrap();
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn other_datasets_of_an_hdf5_file_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.h5");
        let named = |dataset: &str| format!("{}:{dataset}", path.display()).parse::<GridFile>().unwrap();
        for (dataset, double) in [("one", false), ("group/two", true), ("one", true), ("group/two", false)] {
            named(dataset).write(&grid(double)).unwrap();
        }
        for (dataset, double) in [("one", true), ("group/two", false)] {
            let expected = grid(double);
            let mut back = Grid::zeros(expected.shape(), None).unwrap();
            named(dataset).read(&mut back).unwrap();
            back.compare(expected.bytes()).unwrap();
        }
        named("group").write(&grid(false)).unwrap_err();
        assert_eq!(named("group/two").shape().unwrap(), grid(false).shape());
        std::fs::write(&path, "no HDF5 file").unwrap();
        named("one").write(&grid(false)).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"no HDF5 file");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_extension_selects_the_format() {
        for bad in ["grid", "grid.txt", "grid.txt:npy", "grid.h5:", ""] {
            let error = bad.parse::<GridFile>().unwrap_err().to_string();
            assert!(error.contains(".npy"), "{error}");
        }
        let file: GridFile = "run:7.h5".parse().unwrap();
        assert_eq!(file.path, Path::new("run:7.h5"));
        let file: GridFile = "run:7.h5:a/b".parse().unwrap();
        assert_eq!(
            (file.path.to_str(), file.format),
            (Some("run:7.h5"), Format::Hdf5 { dataset: "a/b".into() })
        );
    }

    fn npy(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = [b"\x93NUMPY".as_slice(), &[1, 0], &(header.len() as u16).to_le_bytes()].concat();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn the_stated_header_length_is_known_before_anything_is_reserved() {
        let start = |version: u8| [b"\x93NUMPY".as_slice(), &[version, 0], &[0x20, 1, 0xff, 0xff]].concat();
        assert_eq!(npy_header_bytes(&start(1)), Some(10 + 0x120));
        assert_eq!(npy_header_bytes(&start(2)), Some(12 + 0xffff_0120));
        assert_eq!(npy_header_bytes(&start(2)[..11]), None);
    }

    #[test]
    fn errors_name_the_file_and_the_field() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.npy");
        let file: GridFile = path.display().to_string().parse().unwrap();
        assert!(file.shape().unwrap_err().to_string().contains("bad.npy: No such file"));
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n";
        std::fs::write(&path, npy(good, 48)).unwrap();
        assert_eq!(file.shape().unwrap(), Shape { rows: 3, columns: 4, double: false });
        let change = |from: &str, to: &str| npy(&good.replace(from, to), 48);
        for (bytes, expected) in [
            (b"\x93NUMP".to_vec(), "header is incomplete"),
            (b"\x93NUMPX\x01\x00a\x00".to_vec(), "magic string"),
            (b"\x93NUMPY\x04\x00aaaa".to_vec(), "version"),
            (b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec(), "longer than 64 KiB"),
            (npy(good, 47), "has 47 bytes of data, its header says 48"),
            (change("<f4", ">f4"), "descr: '>f4', expected '<f4' or '<f8'"),
            (change("False", "True"), "fortran_order: True, expected False"),
            (change("3, 4", "12,"), "shape: [12], expected two numbers"),
            (change("3, 4", "0, 4"), "shape: [0, 4]"),
            (change("3, 4", "9999999999999, 9999999999999"), "shape"),
            (change(", 'shape': (3, 4)", ""), "missing key: shape"),
            (change("'shape'", "'form'"), "unknown key: 'form'"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = file.shape().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let path = folder.path().join("bad.h5");
        let file = |dataset: &str| format!("{}:{dataset}", path.display()).parse::<GridFile>().unwrap();
        assert!(file("grid").shape().unwrap_err().to_string().contains("bad.h5: No such file"));
        let hdf5 = hdf5::File::create(&path).unwrap();
        hdf5.new_dataset::<i32>().shape((2, 2)).create("whole").unwrap();
        hdf5.new_dataset::<f32>().shape((2, 2, 2)).create("deep").unwrap();
        hdf5.close().unwrap();
        for (dataset, expected) in
            [("whole", "expected float32 or float64"), ("deep", "shape: [2, 2, 2]"), ("none", "none")]
        {
            let error = file(dataset).shape().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
