//! The bytes of a manifest, version 1.0. `PROTOCOL.md`, "The manifest", is the specification.

use super::view::{self, push_row_major};
use super::*;

const MAGIC: [u8; 8] = *b"\x89WDM\r\n\x1a\n";
const MAJOR: u16 = 1;
const MINOR: u16 = 0;

const PERSISTENT: u8 = 1;
const STRIDED: u8 = 2;

impl Manifest {
    /// Reads a manifest. Its memory stays within a small multiple of `bytes`.
    ///
    /// # Errors
    ///
    /// Anything that is not exactly what [`encode`](Self::encode) writes for a valid manifest.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let sections = Sections::split(bytes)?;
        let mut manifest = Manifest {
            regions: decode_regions(sections.regions)?,
            tensors: Vec::with_capacity(sections.tensors.len()),
            aliases: decode_aliases(sections.aliases, sections.tensors.len())?,
            attrs: Vec::with_capacity(sections.attrs.len()),
            index: Vec::with_capacity(sections.index.len()),
            dims: Vec::with_capacity(2 * sections.dims.len()),
            names: String::from(sections.names),
            checksums: sections.checksums.map(decode_checksums),
        };
        manifest.decode_tensors(sections.tensors, sections.dims)?;
        let names = manifest.decode_index(sections.index)?;
        manifest.decode_attrs(sections.attrs, names)?;
        manifest.check_tensors()?;
        manifest.check_checksums()?;
        Ok(manifest)
    }

    /// The bytes that [`decode`](Self::decode) reads.
    pub fn encode(&self) -> Vec<u8> {
        let counts = self.counts();
        let mut bytes = Vec::with_capacity(counts.encoded_bytes() as usize);
        counts.encode(&mut bytes);
        for region in &self.regions {
            encode_region(&mut bytes, region);
        }
        for record in &self.tensors {
            let persistent = if record.persistent { PERSISTENT } else { 0 };
            let strided = if self.is_strided(record) { STRIDED } else { 0 };
            let (kind, dtype) = (record.kind as u8, record.dtype as u8);
            bytes.extend([
                kind,
                persistent | strided,
                dtype,
                record.ndim,
                record.region,
                0,
                0,
                0,
            ]);
            bytes.extend(record.offset.to_le_bytes());
        }
        for record in &self.tensors {
            let tensor = self.view(record);
            let strides = if self.is_strided(record) {
                tensor.strides
            } else {
                &[]
            };
            let dims = tensor.shape.iter().chain(strides);
            dims.for_each(|dim| bytes.extend(dim.to_le_bytes()));
        }
        for &entity in &self.index {
            bytes.extend(entity.to_le_bytes());
            bytes.extend(u32::from(self.entity_name(entity).len).to_le_bytes());
        }
        for attr in &self.attrs {
            bytes.extend(u32::from(attr.value).to_le_bytes());
            bytes.extend(u32::from(attr.name.len).to_le_bytes());
        }
        for alias in &self.aliases {
            bytes.extend(alias.of.to_le_bytes());
        }
        let checksums = self.checksums.iter().flatten();
        checksums.for_each(|checksum| bytes.extend(checksum.to_le_bytes()));
        bytes.extend(self.names.as_bytes());
        bytes
    }

    /// The size of what [`encode`](Self::encode) gives.
    pub(super) fn encoded_bytes(&self) -> u64 {
        self.counts().encoded_bytes()
    }

    fn counts(&self) -> Counts {
        let dims = |record: &Record| u32::from(record.ndim) << u32::from(self.is_strided(record));
        Counts {
            regions: self.regions.len() as u32,
            tensors: self.tensors.len() as u32,
            aliases: self.aliases.len() as u32,
            attrs: self.attrs.len() as u32,
            dims: self.tensors.iter().map(dims).sum(),
            names: self.names.len() as u64,
            checksums: self.checksums.as_ref().map(|checksums| checksums.len() as u32),
        }
    }

    fn is_strided(&self, record: &Record) -> bool {
        let tensor = self.view(record);
        !view::is_row_major(tensor.shape, tensor.strides)
    }

    /// Reads the records, but neither their names nor whether their views are right.
    fn decode_tensors(&mut self, records: &[[u8; TENSOR]], dims: &[[u8; DIM]]) -> Result<(), ManifestError> {
        let mut rest = dims.iter().map(|dim| u64::from_le_bytes(*dim));
        let mut taken = 0;
        for (number, record) in records.iter().enumerate() {
            let undefined = |field, value| undefined(field, "tensor", number, value);
            let [kind, flags, dtype, ndim, region, pad @ ..] = *record.first_chunk::<8>().expect("16 bytes");
            let kind = match kind {
                0 => TensorKind::Parameter,
                1 => TensorKind::Buffer,
                _ => return Err(undefined("kind", kind.into())),
            };
            if flags & !(PERSISTENT | STRIDED) != 0 {
                return Err(undefined("flags", flags.into()));
            }
            if usize::from(ndim) > MAX_DIMS {
                return Err(undefined("dimensions", ndim.into()));
            }
            if pad != [0; 3] {
                return Err(undefined("padding", pad[0].max(pad[1]).max(pad[2]).into()));
            }
            let dtype = Dtype::from_number(dtype).ok_or_else(|| undefined("dtype", dtype.into()))?;
            let start = self.dims.len();
            let stored = usize::from(ndim) << usize::from(flags & STRIDED != 0);
            taken += stored as u64;
            self.dims.extend(rest.by_ref().take(stored));
            if self.dims.len() != start + stored {
                break;
            }
            if flags & STRIDED == 0 {
                push_row_major(&mut self.dims, start);
            }
            self.tensors.push(Record {
                offset: u64_at(record, 8),
                name: Name::default(),
                dims: start as u32,
                kind,
                persistent: flags & PERSISTENT != 0,
                dtype,
                ndim,
                region,
            });
            if flags & STRIDED != 0 && !self.is_strided(&self.tensors[number]) {
                return Err(undefined("flags", flags.into()));
            }
        }
        check_count("dimensions", dims.len() as u64, taken)
    }

    /// Gives every tensor and alias its name; returns where the names of the attributes start.
    fn decode_index(&mut self, entries: &[[u8; INDEX]]) -> Result<usize, ManifestError> {
        let mut names = NameCutter::default();
        for (number, entry) in entries.iter().enumerate() {
            let entity = u32_at(entry, 0);
            let name = names.cut(&self.names, u32_at(entry, 4))?;
            // A name is never empty: an entity that has one was listed before.
            if entity as usize >= entries.len() || self.entity_name(entity).len != 0 {
                return Err(undefined("entity", "index entry", number, entity.into()));
            }
            *self.entity_name_mut(entity) = name;
            self.index.push(entity);
        }
        Ok(names.at)
    }

    fn decode_attrs(&mut self, entries: &[[u8; ATTR]], at: usize) -> Result<(), ManifestError> {
        let mut names = NameCutter { at, previous: None };
        for (number, entry) in entries.iter().enumerate() {
            let name = names.cut(&self.names, u32_at(entry, 4))?;
            let value = match u32_at(entry, 0) {
                0 => false,
                1 => true,
                value => return Err(undefined("value", "attribute", number, value.into())),
            };
            self.attrs.push(Attr { name, value });
        }
        check_count("name bytes", self.names.len() as u64, names.at as u64)
    }

    fn check_tensors(&self) -> Result<(), ManifestError> {
        let mut last = TensorKind::Parameter;
        for tensor in self.tensors() {
            if tensor.kind < last {
                return Err(ManifestError::Order {
                    name: tensor.name.into(),
                });
            }
            last = tensor.kind;
            check::tensor(&tensor, &self.regions)?;
        }
        Ok(())
    }
}

const HEADER: usize = 48;
const REGION: usize = 104;
const TENSOR: usize = 16;
const DIM: usize = 8;
const INDEX: usize = 8;
const ATTR: usize = 8;
const ALIAS: usize = 4;
const CHECKSUM: usize = 8;

struct Counts {
    regions: u32,
    tensors: u32,
    aliases: u32,
    attrs: u32,
    dims: u32,
    names: u64,
    checksums: Option<u32>,
}

impl Counts {
    fn decode(header: &[u8; HEADER]) -> Result<Counts, ManifestError> {
        let version = u32_at(header, 8);
        let (major, minor) = (version as u16, (version >> 16) as u16);
        if (major, minor) != (MAJOR, MINOR) {
            return Err(ManifestError::Version { major, minor });
        }
        let checksums = match (u32_at(header, 40), u32_at(header, 44)) {
            (0, 0) => None,
            (1, count) => Some(count),
            (0, count) => return Err(undefined("checksums", "header", 0, count.into())),
            (flag, _) => return Err(undefined("has checksums", "header", 0, flag.into())),
        };
        let counts = Counts {
            regions: u32_at(header, 12),
            tensors: u32_at(header, 16),
            aliases: u32_at(header, 20),
            attrs: u32_at(header, 24),
            dims: u32_at(header, 28),
            names: u64_at(header, 32),
            checksums,
        };
        check::cap("regions", counts.regions.into(), MAX_REGIONS)?;
        check::cap("names", counts.entities(), MAX_NAMES)?;
        check::cap("attributes", counts.attrs.into(), MAX_ATTRS)?;
        check::cap("name bytes", counts.names, MAX_BYTES)?;
        Ok(counts)
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(MAGIC);
        bytes.extend(MAJOR.to_le_bytes());
        bytes.extend(MINOR.to_le_bytes());
        for count in [self.regions, self.tensors, self.aliases, self.attrs, self.dims] {
            bytes.extend(count.to_le_bytes());
        }
        bytes.extend(self.names.to_le_bytes());
        bytes.extend(u32::from(self.checksums.is_some()).to_le_bytes());
        bytes.extend(self.checksums.unwrap_or(0).to_le_bytes());
    }

    fn entities(&self) -> u64 {
        u64::from(self.tensors) + u64::from(self.aliases)
    }

    fn encoded_bytes(&self) -> u64 {
        HEADER as u64
            + u64::from(self.regions) * REGION as u64
            + u64::from(self.tensors) * TENSOR as u64
            + u64::from(self.dims) * DIM as u64
            + self.entities() * INDEX as u64
            + u64::from(self.attrs) * ATTR as u64
            + u64::from(self.aliases) * ALIAS as u64
            + u64::from(self.checksums.unwrap_or(0)) * CHECKSUM as u64
            + self.names
    }
}

struct Sections<'a> {
    regions: &'a [[u8; REGION]],
    tensors: &'a [[u8; TENSOR]],
    dims: &'a [[u8; DIM]],
    index: &'a [[u8; INDEX]],
    attrs: &'a [[u8; ATTR]],
    aliases: &'a [[u8; ALIAS]],
    checksums: Option<&'a [[u8; CHECKSUM]]>,
    names: &'a str,
}

impl<'a> Sections<'a> {
    fn split(bytes: &'a [u8]) -> Result<Sections<'a>, ManifestError> {
        let actual = bytes.len() as u64;
        check::encoded_bytes(actual)?;
        let header = bytes.first_chunk().filter(|header| header.starts_with(&MAGIC));
        let counts = Counts::decode(header.ok_or(ManifestError::NotAManifest { bytes: actual })?)?;
        let expected = counts.encoded_bytes();
        if expected != actual {
            return Err(ManifestError::Size { expected, actual });
        }
        let mut rest = &bytes[HEADER..];
        Ok(Sections {
            regions: split(&mut rest, counts.regions.into()),
            tensors: split(&mut rest, counts.tensors.into()),
            dims: split(&mut rest, counts.dims.into()),
            index: split(&mut rest, counts.entities()),
            attrs: split(&mut rest, counts.attrs.into()),
            aliases: split(&mut rest, counts.aliases.into()),
            checksums: counts.checksums.map(|count| split(&mut rest, count.into())),
            names: str::from_utf8(rest).map_err(|error| ManifestError::NotUtf8 {
                at: error.valid_up_to(),
            })?,
        })
    }
}

/// Splits off `count` records, which are there: the size of the whole was checked.
fn split<'a, const N: usize>(rest: &mut &'a [u8], count: u64) -> &'a [[u8; N]] {
    let (section, after) = rest.split_at(count as usize * N);
    *rest = after;
    section.as_chunks().0
}

fn encode_region(bytes: &mut Vec<u8>, region: &Region) {
    let kind = match region.handle {
        HandleKind::Memfd => 0,
        HandleKind::CudaFd => 1,
        HandleKind::CudaIpc => 2,
    };
    bytes.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(region.bytes.to_le_bytes());
    bytes.extend(region.device.0);
    let LegacyHandle { handle, offset } = region.legacy.unwrap_or(NO_LEGACY);
    bytes.extend(handle);
    bytes.extend(offset.to_le_bytes());
}

const NO_LEGACY: LegacyHandle = LegacyHandle {
    handle: [0; 64],
    offset: 0,
};

fn decode_regions(records: &[[u8; REGION]]) -> Result<Vec<Region>, ManifestError> {
    let decode = |(number, record): (usize, &[u8; REGION])| {
        let handle = match record[0] {
            0 => HandleKind::Memfd,
            1 => HandleKind::CudaFd,
            2 => HandleKind::CudaIpc,
            kind => return Err(undefined("kind", "region", number, kind.into())),
        };
        let padding = u64_at(record, 0) >> 8;
        if padding != 0 {
            return Err(undefined("padding", "region", number, padding));
        }
        let legacy = LegacyHandle {
            handle: array_at(record, 32),
            offset: u64_at(record, 96),
        };
        let legacy = match handle {
            HandleKind::CudaIpc => Some(legacy),
            _ if legacy == NO_LEGACY => None,
            _ => return Err(ManifestError::LegacyHandle { region: number }),
        };
        let (bytes, device) = (u64_at(record, 8), DeviceUuid(array_at(record, 16)));
        let region = Region {
            handle,
            bytes,
            device,
            legacy,
        };
        check::region(number, &region)?;
        Ok(region)
    };
    records.iter().enumerate().map(decode).collect()
}

fn decode_aliases(records: &[[u8; ALIAS]], tensors: usize) -> Result<Vec<Alias>, ManifestError> {
    let decode = |(number, record): (usize, &[u8; ALIAS])| {
        let of = u32::from_le_bytes(*record);
        if of as usize >= tensors {
            return Err(undefined("tensor", "alias", number, of.into()));
        }
        Ok(Alias {
            name: Name::default(),
            of,
        })
    };
    records.iter().enumerate().map(decode).collect()
}

fn decode_checksums(records: &[[u8; CHECKSUM]]) -> Vec<u64> {
    records.iter().map(|record| u64::from_le_bytes(*record)).collect()
}

/// Cuts the names off one after another, and checks that they ascend.
#[derive(Default)]
struct NameCutter {
    at: usize,
    previous: Option<Name>,
}

impl NameCutter {
    fn cut(&mut self, names: &str, len: u32) -> Result<Name, ManifestError> {
        let end = self.at + len as usize;
        if end > names.len() {
            let (counted, taken) = (names.len() as u64, end as u64);
            return Err(ManifestError::Count {
                what: "name bytes",
                counted,
                taken,
            });
        }
        let text = names
            .get(self.at..end)
            .ok_or(ManifestError::NotUtf8 { at: end })?;
        check::name(text)?;
        let previous = self.previous.map_or("", |name| name.of(names));
        if previous >= text {
            let (previous, name) = (previous.into(), text.into());
            return Err(ManifestError::Unsorted { previous, name });
        }
        // Capped above: the names by their section, one name by its own cap.
        let name = Name {
            start: self.at as u32,
            len: len as u16,
        };
        self.at = end;
        self.previous = Some(name);
        Ok(name)
    }
}

fn check_count(what: &'static str, counted: u64, taken: u64) -> Result<(), ManifestError> {
    if counted != taken {
        return Err(ManifestError::Count { what, counted, taken });
    }
    Ok(())
}

fn undefined(field: &'static str, what: &'static str, number: usize, value: u64) -> ManifestError {
    ManifestError::Field {
        field,
        what,
        number,
        value,
    }
}

fn u32_at<const N: usize>(record: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(array_at(record, at))
}

fn u64_at<const N: usize>(record: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(array_at(record, at))
}

/// `M` bytes of a fixed-size record; `at` is a constant of the format.
fn array_at<const N: usize, const M: usize>(record: &[u8; N], at: usize) -> [u8; M] {
    record[at..at + M].try_into().expect("a slice of M bytes")
}
