//! Imports: from a source, through a staged tree, to a committed image.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::blobs::Blobs;
use super::describe::{Ids, Times};
use super::erofs::{Expected, measure, pack};
use super::layer::Role;
use super::limits::Budget;
use super::path::TreePath;
use super::tarball::Tarball;
use super::tree::{TREE_DIR, Tree, unreadable};
use super::{
    Image, ImageConfig, ImageName, Images, OnProgress, Progress, Step, blocking, describe, layer,
    layered, reader, stream,
};
use crate::files;
use crate::layout::Stage;
use crate::ledger::{ImageRow, LayerFacts, OriginRow};

/// Name of the directory that is renamed to become the image.
const PACKED_DIR: &str = "packed";
/// Name of the file that an archive is spooled to.
const ARCHIVE_FILE: &str = "archive";
/// Read from a source at a time.
const BUFFER: usize = 256 * 1024;

/// What an image with a layer on top of another is made of, besides the layer.
#[derive(Debug, Clone)]
pub struct Layered {
    pub base: ImageId,
    /// Bytes that the files of the layer may have, holes included.
    pub room: u64,
    /// Files that are not taken along.
    pub without: &'static [&'static str],
    /// None: it is configured as its base, and known by all of its tree.
    pub built: Option<Built>,
}

/// What a build says about its image. The times of files do not tell it from others.
#[derive(Debug, Clone)]
pub struct Built {
    pub config: ImageConfig,
    /// Everything of the layer gets this time, in seconds since 1970.
    pub time: Option<i64>,
}

/// What a new image is called, and what it was pulled as. Both are recorded with it, or nothing is.
#[derive(Default, Clone, Copy)]
pub(crate) struct Called<'a> {
    pub(crate) name: Option<&'a ImageName>,
    /// And the reference with its digest.
    pub(crate) origin: Option<(&'a OriginRow, &'a str)>,
}

impl<'a> From<Option<&'a ImageName>> for Called<'a> {
    fn from(name: Option<&'a ImageName>) -> Self {
        Self { name, origin: None }
    }
}

impl Images {
    /// Imports an archive of any supported kind from a stream, through a file in the stage.
    pub async fn import_stream(
        &self,
        name: Option<&ImageName>,
        mut reader: impl Read + Send + 'static,
        progress: OnProgress,
    ) -> Result<Image, StoreError> {
        let tell = progress.clone();
        let fill = move |tree: &mut Tree, stage: &Path| archive(&mut reader, stage, tree, &tell);
        self.import_with(name.into(), progress, fill).await
    }

    /// Imports a root filesystem from a tar stream, plain or gzip, as it comes. How long a stream may
    /// stall is the reader's business: an error from it ends the import. Its files have at `most` so
    /// many bytes, holes included.
    pub async fn import_tar_stream(
        &self,
        name: Option<&ImageName>,
        reader: impl Read + Send + 'static,
        config: ImageConfig,
        most: u64,
        progress: OnProgress,
    ) -> Result<Image, StoreError> {
        let tell = progress.clone();
        let fill = move |tree: &mut Tree, _: &Path| {
            let limits = tree.budget.limits;
            tree.budget.at_most(most);
            let tarball = Tarball::with_sparse_files(stream::plain(reader, &limits)?);
            layer::apply(tarball, Role::Root, tree, &tell)?;
            Ok(config)
        };
        self.import_with(name.into(), progress, fill).await
    }

    /// Makes an image of another one with the layer of a filesystem save on top, but for the files
    /// in `without`. The files of the layer have at most `room` bytes, holes included.
    pub async fn import_layer(
        &self,
        name: Option<&ImageName>,
        layered: Layered,
        layer: impl Read + Send + 'static,
        progress: OnProgress,
    ) -> Result<Image, StoreError> {
        let Layered { base, room, without, built } = layered;
        let row = self.usable(&base).await?;
        let (from, tell) = (self.path_of(&row), progress.clone());
        let times = if built.is_some() { Times::DoNot } else { Times::Matter };
        let fill = move |tree: &mut Tree, _: &Path| {
            reader::unpack(&from, tree)?;
            tree.budget.at_most(tree.budget.bytes().saturating_add(room));
            let (config, time) = built.map_or((row.config, None), |it| (it.config, it.time));
            tree.time = time;
            layer::apply(Tarball::with_sparse_files(layer), Role::Layer, tree, &tell)?;
            for path in without {
                let path = TreePath::parse(path.as_bytes(), &tree.budget.limits)?;
                tree.remove(&path)?;
            }
            Ok(config)
        };
        self.import_as(times, name.into(), progress, fill).await
    }

    /// Stages a tree with `fill`, which also says what the image is configured to be and may use
    /// the directory for files of its own; then commits it.
    pub(crate) async fn import_with(
        &self,
        called: Called<'_>,
        progress: OnProgress,
        fill: impl FnOnce(&mut Tree, &Path) -> Result<ImageConfig, StoreError> + Send + 'static,
    ) -> Result<Image, StoreError> {
        self.import_as(Times::Matter, called, progress, fill).await
    }

    async fn import_as(
        &self,
        times: Times,
        called: Called<'_>,
        progress: OnProgress,
        fill: impl FnOnce(&mut Tree, &Path) -> Result<ImageConfig, StoreError> + Send + 'static,
    ) -> Result<Image, StoreError> {
        let stage = self.shared.layout.stage()?;
        let (limits, agent) = (self.shared.limits, self.shared.agent);
        progress(Progress::step(Step::Unpacking));
        let (stage, config, id) = blocking(move || {
            let mut tree = Tree::create(&stage.path().join(TREE_DIR), Budget::new(limits))?;
            let config = fill(&mut tree, stage.path())?;
            let id = complete(&mut tree, &stage, &config, agent)?.of(times);
            Ok((stage, config, id))
        })
        .await?;
        progress(Progress::step(Step::Packing));
        self.commit(stage, id, config, called).await
    }

    /// Commits a finished tree. If the image is there already and sound, only the name is new.
    async fn commit(
        &self,
        stage: Stage,
        id: ImageId,
        config: ImageConfig,
        called: Called<'_>,
    ) -> Result<Image, StoreError> {
        if let Some(row) = self.shared.ledger.image(&id).await?
            && self.check(&row, Expected::verify).await.is_ok()
        {
            // A removal may have come in between; then the name has nothing to stand for.
            match self.call(&id, called).await {
                Err(StoreError::NoSuchImage(_)) => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    // Removing a tree takes a while.
                    let tidy = move || {
                        drop(stage);
                        Ok(())
                    };
                    blocking(tidy).await?;
                    return self.inspect(id.as_str()).await;
                }
            }
        }
        let row = self.pack_stage(&stage, id, config).await?;
        self.install(stage, &row, called).await?;
        // If it was corrupt, what is remembered of it is not true any more.
        self.shared.verified.lock().remove(&row.id);
        self.inspect(row.id.as_str()).await
    }

    /// What is new of an image that is there.
    async fn call(&self, id: &ImageId, called: Called<'_>) -> Result<(), StoreError> {
        let _turn = self.shared.commit.lock().await;
        let name = called.name.map(ImageName::as_str);
        match (name, called.origin) {
            (None, None) => Ok(()),
            (Some(name), None) => self.shared.ledger.name_image(name, id).await,
            (name, Some(origin)) => self.shared.ledger.record_origin(id, name, origin).await,
        }
    }

    /// Gives an image the present agent: same id, another root file. Machines that run from the old
    /// file keep it open.
    pub(super) async fn renew(&self, old: ImageRow) -> Result<ImageRow, StoreError> {
        tracing::info!(image = %old.id, "giving an image the present agent");
        let stage = self.shared.layout.stage()?;
        let (from, agent) = (self.path_of(&old), self.shared.agent);
        // It was within limits once; a few entries of ours must not make it too large now.
        let limits = super::Limits { bytes: u64::MAX, entries: u64::MAX, ..self.shared.limits };
        let config = old.config.clone();
        let (stage, ids) = blocking(move || {
            let mut tree = Tree::create(&stage.path().join(TREE_DIR), Budget::new(limits))?;
            reader::unpack(&from, &mut tree)?;
            let ids = complete(&mut tree, &stage, &config, agent)?;
            Ok((stage, ids))
        })
        .await?;
        if ids.times_of(&old.id).is_none() {
            let (path, found) = (self.path_of(&old), ids.exact);
            return Err(StoreError::CorruptImage {
                id: old.id.to_string(),
                detail: format!("the tree in {} is that of {found}", path.display()),
            });
        }
        let row = self.pack_stage(&stage, old.id, old.config).await?;
        let row = ImageRow { created_at_ms: old.created_at_ms, ..row };
        self.install(stage, &row, Called::default()).await?;
        Ok(row)
    }

    /// Installs an image from a root file of another installation: what is in it must be the image
    /// that it is said to be, and gets the present agent.
    pub(crate) async fn install_root(
        &self,
        id: &ImageId,
        config: ImageConfig,
        file: PathBuf,
    ) -> Result<Image, StoreError> {
        let stage = self.shared.layout.stage()?;
        let (limits, agent, said) = (self.shared.limits, self.shared.agent, id.clone());
        let (stage, config) = blocking(move || {
            let mut tree = Tree::create(&stage.path().join(TREE_DIR), Budget::new(limits))?;
            reader::unpack(&file, &mut tree)?;
            let found = complete(&mut tree, &stage, &config, agent)?;
            if found.times_of(&said).is_none() {
                let found = found.exact;
                let text = format!("the image is said to be {said} and is {found}");
                return Err(StoreError::Invalid(text));
            }
            Ok((stage, config))
        })
        .await?;
        self.commit(stage, id.clone(), config, Called::default()).await
    }

    /// Makes the root file, still in the stage.
    async fn pack_stage(
        &self,
        stage: &Stage,
        id: ImageId,
        config: ImageConfig,
    ) -> Result<ImageRow, StoreError> {
        let dir = stage.path().join(PACKED_DIR);
        std::fs::create_dir(&dir).map_err(files::failed("create a staging directory"))?;
        let agent_hash = self.shared.agent_hash.clone();
        // Another agent is another file, so that the ledger always names a file that is right.
        let file = format!("{}.erofs", &agent_hash[..16]);
        let path = dir.join(&file);
        pack(&stage.path().join(TREE_DIR), &path).await?;
        let (file_bytes, file_hash) = blocking(move || {
            let measured = measure(&path).map_err(files::failed("read the packed image"))?;
            files::sync_dir(&dir).map_err(files::failed("write the image to disk"))?;
            Ok(measured)
        })
        .await?;
        let (created_at_ms, names) = (crate::ledger::now_ms(), Vec::new());
        let layers = LayerFacts::default();
        Ok(ImageRow {
            id,
            config,
            file,
            file_bytes,
            file_hash,
            agent_hash,
            created_at_ms,
            names,
            layers,
        })
    }

    /// Moves the root file to its place and records it, in this order: a crash in between leaves a
    /// file that nobody refers to.
    async fn install(
        &self,
        stage: Stage,
        row: &ImageRow,
        called: Called<'_>,
    ) -> Result<(), StoreError> {
        let _turn = self.shared.commit.lock().await;
        let (images, dir) = (self.shared.layout.images(), self.shared.layout.image(&row.id));
        let file = row.file.clone();
        blocking(move || {
            let packed = stage.path().join(PACKED_DIR);
            place(&packed, &file, &dir, &images)
                .map_err(files::failed("move an image to its place"))
        })
        .await?;
        let name = called.name.map(ImageName::as_str);
        self.shared.ledger.commit_image(row, name, called.origin).await?;
        // Files of machines that were saved with another agent stay while they are needed.
        self.sweep_files(&row.id).await
    }
}

/// Unpacks an archive of a kind that is only known once all of it is there: `docker save` writes its
/// manifest last.
pub(crate) fn archive(
    input: &mut dyn Read,
    stage: &Path,
    tree: &mut Tree,
    progress: &OnProgress,
) -> Result<ImageConfig, StoreError> {
    let limits = tree.budget.limits;
    let path = stage.join(ARCHIVE_FILE);
    let file = File::create_new(&path).map_err(files::failed("create a staging file"))?;
    spool(&mut stream::plain(input, &limits)?, file)?;
    let open = || File::open(&path).map_err(files::failed("open a staging file"));
    let blobs = Blobs::tar(open()?, &mut Budget::new(limits))?;
    if let Some(format) = layered::detect(&blobs) {
        return layered::unpack(&blobs, format, tree, progress);
    }
    let tarball = Tarball::new(BufReader::with_capacity(BUFFER, open()?));
    layer::apply(tarball, Role::Root, tree, progress)?;
    Ok(ImageConfig::default())
}

fn spool(input: &mut dyn Read, mut file: File) -> Result<(), StoreError> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = input.read(&mut buffer).map_err(unreadable)?;
        if count == 0 {
            return Ok(());
        }
        file.write_all(&buffer[..count]).map_err(files::failed("write a staging file"))?;
    }
}

/// The rest of a tree once its source is in it; gives its ids.
fn complete(
    tree: &mut Tree,
    stage: &Stage,
    config: &ImageConfig,
    agent: &[u8],
) -> Result<Ids, StoreError> {
    tree.finish()?;
    let ids = describe::image_ids(&stage.path().join(TREE_DIR), config)?;
    tree.add_agent(agent)?;
    Ok(ids)
}

/// `dir` may be there: from a crash, with a corrupt file, or with the file for another agent.
fn place(packed: &Path, file: &str, dir: &Path, images: &Path) -> std::io::Result<()> {
    if dir.exists() {
        std::fs::rename(packed.join(file), dir.join(file))?;
        return files::sync_dir(dir);
    }
    std::fs::rename(packed, dir)?;
    files::sync_dir(images)
}
