//! What can be wrong with a manifest.

use super::{MAX_BYTES, MAX_DIMS, MAX_NAME_BYTES, MAX_REGION_BYTES};
use crate::content::Dtype;

/// Why bytes are no manifest, or why one cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ManifestError {
    /// The bytes do not start with the manifest's magic.
    #[error("these {bytes} bytes do not start with a manifest's header; check what the publisher sent")]
    NotAManifest { bytes: u64 },
    /// A version that this code does not know.
    #[error("manifest version {major}.{minor} is not known here, only 1.0; use one weightd on both sides")]
    Version { major: u16, minor: u16 },
    /// The counts of the header ask for another size than the manifest has.
    #[error("manifest has {actual} bytes where its header asks for {expected}; publish it anew")]
    Size { expected: u64, actual: u64 },
    /// Larger than [`MAX_BYTES`].
    #[error("manifest of {bytes} bytes is over the cap of {MAX_BYTES}; shorten the names or publish less")]
    TooLarge { bytes: u64 },
    /// More of something than a manifest may have.
    #[error("manifest has {count} {what}, over the cap of {cap}; publish fewer")]
    TooMany {
        what: &'static str,
        count: u64,
        cap: u64,
    },
    /// A field with a value that the format does not define, or that has another spelling.
    #[error("manifest field {field} of {what} {number} has the undefined value {value}; publish it anew")]
    Field {
        field: &'static str,
        what: &'static str,
        number: usize,
        value: u64,
    },
    /// The dimensions or names that the records take are not those that the header counts.
    #[error("manifest counts {counted} {what} and its records take {taken}; publish it anew")]
    Count {
        what: &'static str,
        counted: u64,
        taken: u64,
    },
    /// Names that are not UTF-8, or are cut inside a character.
    #[error("manifest names are not UTF-8, or cut inside a character, at byte {at}; publish UTF-8 names")]
    NotUtf8 { at: usize },
    /// A name that is empty or longer than [`MAX_NAME_BYTES`].
    #[error("a manifest name of {bytes} bytes, starting {start:?}, is not 1 to {MAX_NAME_BYTES}; rename it")]
    NameLength { start: String, bytes: usize },
    /// Two tensors, aliases or attributes of one name.
    #[error("manifest lists the name {name:?} twice; give each tensor, alias and attribute its own")]
    Duplicate { name: String },
    /// The sorted index is not in strictly ascending order.
    #[error("manifest name {name:?} does not sort after {previous:?}; publish it anew")]
    Unsorted { previous: String, name: String },
    /// A buffer is listed before a parameter.
    #[error("manifest lists parameter {name:?} after a buffer; publish it anew")]
    Order { name: String },
    /// An alias of a name that is not there.
    #[error("alias {alias:?} stands for {of:?}, which the manifest lacks; add the tensor or drop the alias")]
    MissingCanonical { alias: String, of: String },
    /// An alias that leads back to itself.
    #[error("alias {alias:?} stands for itself through other aliases; point one of them at a tensor")]
    AliasCycle { alias: String },
    /// A region larger than [`MAX_REGION_BYTES`], or a legacy handle that leads past it.
    #[error("region {region} ends at byte {end}, over the cap of {MAX_REGION_BYTES}; split it")]
    RegionTooLarge { region: usize, end: u64 },
    /// A legacy handle on another kind of region, or a legacy region without one.
    #[error("region {region} must have a legacy handle if it is of kind CudaIpc, and only then")]
    LegacyHandle { region: usize },
    /// A tensor in a region that is not there.
    #[error("tensor {tensor:?} lies in region {region}, and there are {regions}; add the region first")]
    NoRegion {
        tensor: String,
        region: usize,
        regions: usize,
    },
    /// A tensor that is no view of its region.
    #[error("tensor {tensor:?}: {source}")]
    View { tensor: String, source: ViewError },
}

/// Why a tensor is no view of its region.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ViewError {
    /// More than [`MAX_DIMS`] dimensions.
    #[error("{ndim} dimensions are over the cap of {MAX_DIMS}; merge some")]
    TooManyDims { ndim: usize },
    /// Not one stride per dimension.
    #[error("{strides} strides for {ndim} dimensions; give one for each, or none for packed elements")]
    StrideCount { strides: usize, ndim: usize },
    /// A size or an end that does not fit 64 bits.
    #[error("its shape, strides or offset overflow 64 bits; check them")]
    Overflow,
    /// It ends after its region.
    #[error(
        "bytes {offset}..{end} overrun its region of {region_bytes} bytes; check offset, shape and strides"
    )]
    Overruns {
        offset: u64,
        end: u64,
        region_bytes: u64,
    },
    /// It does not start on a multiple of its element's size.
    #[error("offset {offset} is not a multiple of {align} bytes, its element's size; move it")]
    Misaligned { offset: u64, align: u64 },
    /// Elements of less than a byte that are not packed.
    #[error("{} elements must be packed, since single ones have no address; drop the strides", .dtype.name())]
    StridedSubByte { dtype: Dtype },
    /// Elements of less than a byte that end inside a byte.
    #[error("{elements} {} elements do not fill whole bytes; pad the last dimension", .dtype.name())]
    PartialByte { dtype: Dtype, elements: u64 },
}
